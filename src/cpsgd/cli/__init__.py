"""The command line, one module a command; `app` puts them together.

Commands import what they need when they run, so that `cpsgd --help` answers at once. Errors raised on purpose and files
that cannot be read end in one red line and exit code 2. Results go to stdout, everything else to stderr.
"""
