"""The log of a port's requests: our mistakes, with their traceback, and nothing that a stranger can make it say.

A client that reaches the port may send bytes that are no HTTP. It gets a 400; a traceback each would fill the log.
"""

import logging

from aiohttp.http_exceptions import HttpProcessingError

REQUESTS = logging.getLogger("polyrl.requests")


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


REQUESTS.addFilter(_is_ours)
