"""A round between a server and its clients, whatever engine moves the bytes.

* `server.ServerSession` says what to send to whom, takes the answers, knows who dropped out, and releases a mean.
* `client.ClientSession` turns a request into an answer, if it keeps the client's own `limits.Limits`.
* `messages.Request` is what travels from one to the other; answers have the frames of `cpsgd.secagg` or `cpsgd.codec`.
* `settings.Memory` and `settings.Signing` are files of the client's operator: what was answered, who everybody is.

An engine moves bytes, waits, and calls the train function. See `cpsgd.engines.flower` and
`cpsgd.engines.nvflare`.
"""
