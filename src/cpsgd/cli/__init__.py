"""The command line: commands by what they are about, and `app` that puts them together.

Options are fields of the library's own dataclasses (`options.from_class`), or are written here, once. Commands import
what they need when they run, so that `cpsgd --help` answers at once. Errors raised on purpose and files that cannot be
read end in one red line and exit code 2. Results go to stdout, everything else to stderr.
"""
