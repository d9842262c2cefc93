"""The error that says: what was given cannot be used. It needs neither torch nor pydantic."""


class UserError(ValueError):
    """A setting, a file or data that cannot be used, told in one line for whoever gave it.

    Programs answer it with that line and exit code 2. Any other ValueError is a fault of the
    program or of a library, and its traceback is shown.
    """
