"""The description of the manager's routes as OpenAPI 3.1, made from the table in routes.py.

Left out: the frames on the two WebSockets once these are open (wire/frames.py).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from polyrl import __version__
from polyrl.manager.serving.requests import AskErrorReply
from polyrl.wire.control import SESSION_HEADER, WORKER_NAME, ErrorReply
from polyrl.wire.frames import PROTOCOL

if TYPE_CHECKING:
    from polyrl.manager.routes import Route

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "It is not what was expected; the line says where and why.",
    401: "There is no token, or none that this run knows.",
    403: "The token's scope does not allow this; the admin token's does.",
    404: "There is no worker, host or part of that name.",
    408: "The body did not come within `limits.request_timeout_s`.",
    409: "It does not fit the state: another protocol, another configuration, no run, an engine without a model.",
    410: "The session is over: join, or open the run, again.",
    413: "The body is larger than `limits.max_body_mb`.",
    423: "A worker of that name is connected; when it is gone, or silent, its name is free.",
    429: "Too many joins from this address; try again in a second.",
}
_ASK_ERRORS = {
    **_ERRORS,
    403: "It is a worker's token; the generate token and the admin token may do this.",
    404: "There is no model of that name.",
    429: "More answers are being written than `serve.max_samples`; try again.",
    500: "No worker could write the answer.",
    503: "There is no run, no worker brought a token for `serve.token_timeout_s`, or the manager stops.",
}
_CONTENT_TYPES = {
    "json": ("application/json",),
    "text": ("text/plain",),
    "events": ("application/json", "text/event-stream"),
    "page": ("text/html", "text/css", "text/javascript", "image/svg+xml"),
}
"""With `stream`, answers are server-sent events, the last one `[DONE]`, as OpenAI has it."""
_OPEN_TO_ALL: list[dict[str, list[str]]] = []


def document(routes: "Sequence[Route]") -> Schema:
    """Return the whole description."""
    kinds = [kind for route in routes for kind in (route.body, route.reply) if kind is not None]
    _, schemas = msgspec.json.schema_components(dict.fromkeys([*kinds, ErrorReply, AskErrorReply]), ref_template=_REF)
    paths: Schema = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PolyRL manager",
            "version": __version__,
            "x-protocol": PROTOCOL,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": (
                "Control of a run: joining, opening, status; and answers for OpenAI's clients. "
                "Every route but health and the dashboard's page wants a bearer token; a worker's token may join and "
                "stream, the generate token may ask, the view token may look, the admin token may do everything. "
                "Whatever is refused is answered with one line of JSON."
            ),
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}, "schemas": schemas},
    }


def _operation(route: "Route") -> Schema:
    operation: Schema = {"operationId": route.handle.__name__, "summary": route.summary}
    if route.scope is None:
        operation["security"] = _OPEN_TO_ALL
    if "{name}" in route.path:
        operation["parameters"] = [_parameter("name", "path", {"type": "string", "pattern": WORKER_NAME})]
    if route.body is not None:
        content = {"application/json": {"schema": _ref(route.body)}}
        operation["requestBody"] = {"required": not route.may_be_empty, "content": content}
    if route.kind == "socket":
        operation["description"] = "A WebSocket. Frames are binary: msgpack arrays with a tag, as wire/frames.py says."
        session = _parameter(SESSION_HEADER, "header", {"type": "string"})
        operation["parameters"] = [{**session, "description": "What the join, or the opening of the run, returned."}]
    operation["responses"] = {**_done(route), **_refusals(route)}
    return operation


def _parameter(name: str, place: str, schema: Schema) -> Schema:
    return {"name": name, "in": place, "required": True, "schema": schema}


def _done(route: "Route") -> Schema:
    if route.kind == "socket":
        return {"101": {"description": "It is open. Say Hello first."}}
    content: Schema = {kind: {"schema": {"type": "string"}} for kind in _CONTENT_TYPES[route.kind]}
    if route.kind not in ("text", "page"):
        content["application/json"] = {"schema": {"type": "object"} if route.reply is None else _ref(route.reply)}
    return {"200": {"description": "Done.", "content": content}}


def _refusals(route: "Route") -> Schema:
    codes = {*route.errors}
    codes |= set() if route.scope is None else {401, 403}
    codes |= set() if route.body is None else {400, 408, 413}
    codes |= {400, 410} if route.kind == "socket" else set()
    codes |= {429} if route.is_limited else set()
    words, shape = (_ASK_ERRORS, AskErrorReply) if route.is_of_openai else (_ERRORS, ErrorReply)
    line = {"application/json": {"schema": _ref(shape)}}
    return {str(code): {"description": words[code], "content": line} for code in sorted(codes)}


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REF.format(name=kind.__name__)}
