"""The long run needs `atheris`, the tests do not."""

collect_ignore = ["guided.py"]
