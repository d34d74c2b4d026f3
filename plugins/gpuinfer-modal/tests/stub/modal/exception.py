"""The errors of the stub."""


class Error(Exception):
    pass


class AuthError(Error):
    pass


class NotFoundError(Error):
    pass
