"""A round between a server and its clients, whatever engine moves the bytes.

* `server.ServerSession` says what to send to whom, takes the answers, knows who fell out and why, and releases a mean.
* `client.ClientSession` turns a request into an answer, if it keeps the client's own `limits.Limits`.
* `messages.Request` is what travels from one to the other; answers have the frames of `cpsgd.secagg` or `cpsgd.codec`.
* `memory.Memory` and `signing.Signing` are files on the client's machine: what it answered, who it and the others are.

An engine carries bytes, waits, and calls the train function. See `cpsgd.engines.flower`.
"""
