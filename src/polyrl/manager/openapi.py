"""The description of the manager's HTTP side, as OpenAPI 3.1. Schemas come from wire/control.py and from serving/.

    python -m polyrl.manager.openapi > src/polyrl/manager/openapi.json

A test compares the file with what this module says, and sends requests made from it to a manager. Left out: what
travels over the two WebSockets once they are open (wire/frames.py).
"""

import json
from typing import Any

import msgspec

from polyrl import __version__
from polyrl.manager.serving import failures, replies, requests
from polyrl.wire import control
from polyrl.wire.frames import PROTOCOL

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_ERRORS = {
    400: "It is not what was expected; the line says where and why.",
    401: "There is no token, or none that this run knows.",
    403: "It is a worker's token; the admin token may do this.",
    404: "There is no worker of that name.",
    408: "The body did not come within `limits.request_timeout_s`.",
    409: "It does not fit the state: another protocol, another configuration, no run, an engine without a model.",
    410: "The session is over: join, or open the run, again.",
    413: "The body is larger than `limits.max_body_mb`.",
    423: "A worker of that name is connected; when it is gone, or silent, its name is free.",
    429: "Too many joins from this address; try again in a second.",
}
_BODY_ERRORS = (400, 408, 413)
_ASK_ERRORS = {
    **_ERRORS,
    403: "It is a worker's token; the generate token and the admin token may do this.",
    404: "There is no model of that name.",
    429: "More answers are being written than `serve.max_samples`; try again.",
    500: "No worker could write the answer.",
    503: "There is no run, no worker brought a token for `serve.token_timeout_s`, or the manager stops.",
}
_OPEN_TO_ALL: list[dict[str, list[str]]] = []


def document() -> Schema:
    """The whole description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "PolyRL manager",
            "version": __version__,
            "x-protocol": PROTOCOL,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": (
                "Control of a run: joining, opening, status; and answers for whoever asks, as OpenAI's clients do. "
                "Every route but health wants a bearer token; a worker's token may join and stream, the generate "
                "token may ask, the admin token may do everything. Whatever is refused is answered with one line of "
                "JSON."
            ),
        },
        "security": [{"token": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def text() -> str:
    return json.dumps(document(), indent=1) + "\n"


def _schemas() -> Schema:
    kinds = [
        control.JoinRequest,
        control.JoinReply,
        control.NameReply,
        control.RunRequest,
        control.RunReply,
        control.DrainRequest,
        control.Status,
        control.ErrorReply,
        requests.CompletionRequest,
        requests.ChatRequest,
        replies.ModelList,
        replies.Completion,
        replies.ChatReply,
        failures.AskErrorReply,
    ]
    _, schemas = msgspec.json.schema_components(kinds, ref_template=_REF)
    return schemas


def _paths() -> Schema:
    return {
        "/v1/health": {"get": {**_operation("health", "Whether it answers.", _flag("status", "ok")), **_free()}},
        "/v1/openapi.json": {"get": _operation("openapi", "This description.", {"type": "object"}, errors=(401,))},
        "/v1/join": {
            "post": _operation(
                "join",
                "Join the fleet. Who joins under a name that nobody is connected under takes it over.",
                _ref(control.JoinReply),
                body=control.JoinRequest,
                errors=(401, 403, 409, 423, 429),
            )
        },
        "/v1/run": {
            "post": _operation(
                "open_run",
                "Open the run, or come back to it with the same configuration.",
                _ref(control.RunReply),
                body=control.RunRequest,
                errors=(401, 403, 409),
            )
        },
        "/v1/status": {
            "get": _operation(
                "status",
                "Who is there, what runs, who waits for whom.",
                _ref(control.Status),
                errors=(401, 403),
            )
        },
        "/v1/metrics": {"get": _metrics()},
        "/v1/workers/{name}": {"get": _look_up()},
        "/v1/workers/{name}/drain": {"post": _drain()},
        "/v1/pause": {"post": _pausing("pause", "Give no more leases; running ones go on.", paused=True)},
        "/v1/resume": {"post": _pausing("resume", "Give leases again.", paused=False)},
        "/v1/models": {"get": _models()},
        "/v1/completions": {
            "post": _asking("complete", "Go on after a prompt.", requests.CompletionRequest, replies.Completion)
        },
        "/v1/chat/completions": {
            "post": _asking(
                "chat", "Answer a chat, with the model's template.", requests.ChatRequest, replies.ChatReply
            )
        },
        "/v1/worker": {"get": _stream("worker_stream", "A worker's stream of frames.", errors=(400, 401, 410))},
        "/v1/trainer": {
            "get": _stream("trainer_stream", "The trainer's stream of frames.", errors=(400, 401, 403, 410))
        },
    }


def _look_up() -> Schema:
    summary = "Whether a worker that is about to start will be let in under this name."
    operation = _operation("look_up", summary, _ref(control.NameReply), errors=(401, 403, 404))
    return {**operation, "parameters": [_name()]}


def _drain() -> Schema:
    operation = _operation(
        "drain",
        "Have a worker hand everything over and leave. The body may be left out.",
        {"type": "object", "properties": {"draining": {"type": "string"}}, "required": ["draining"]},
        body=control.DrainRequest,
        errors=(401, 403, 404),
    )
    operation["requestBody"]["required"] = False
    return {**operation, "parameters": [_name()]}


def _name() -> Schema:
    schema = {"type": "string", "pattern": control.WORKER_NAME}
    return {"name": "name", "in": "path", "required": True, "schema": schema}


def _metrics() -> Schema:
    operation = _operation("metrics", "Metrics in Prometheus' text format.", {"type": "string"}, errors=(401, 403))
    answer = operation["responses"]["200"]
    answer["content"] = {"text/plain": answer["content"]["application/json"]}
    return operation


def _models() -> Schema:
    operation = _operation("models", "The model that answers.", _ref(replies.ModelList))
    return {**operation, "responses": {**operation["responses"], **_ask_errors(401, 403)}}


def _asking(operation_id: str, summary: str, body: type[msgspec.Struct], reply: type[msgspec.Struct]) -> Schema:
    """As OpenAI has it: whole, or with `stream` as server-sent events of chunks, the last one `[DONE]`."""
    operation = _operation(operation_id, summary, _ref(reply), body=body)
    done = operation["responses"]["200"]
    done["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    errors = _ask_errors(400, 401, 403, 404, 408, 413, 429, 500, 503)
    return {**operation, "responses": {"200": done, **errors}}


def _ask_errors(*codes: int) -> Schema:
    line = {"application/json": {"schema": _ref(failures.AskErrorReply)}}
    return {str(code): {"description": _ASK_ERRORS[code], "content": line} for code in codes}


def _pausing(operation_id: str, summary: str, *, paused: bool) -> Schema:
    return _operation(operation_id, summary, _flag("paused", paused), errors=(401, 403, 409))


def _stream(operation_id: str, summary: str, *, errors: tuple[int, ...]) -> Schema:
    session = {"name": control.SESSION_HEADER, "in": "header", "required": True, "schema": {"type": "string"}}
    return {
        "operationId": operation_id,
        "summary": summary,
        "description": "A WebSocket. Frames are binary: msgpack arrays with a tag, as wire/frames.py has them.",
        "parameters": [{**session, "description": "What the join, or the opening of the run, was answered with."}],
        "responses": {"101": {"description": "It is open. Say Hello first."}, **_errors(errors)},
    }


def _operation(
    operation_id: str,
    summary: str,
    reply: Schema,
    *,
    body: type[msgspec.Struct] | None = None,
    errors: tuple[int, ...] = (),
) -> Schema:
    done = {"200": {"description": "Done.", "content": {"application/json": {"schema": reply}}}}
    operation: Schema = {"operationId": operation_id, "summary": summary}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
        errors = tuple(sorted((*errors, *_BODY_ERRORS)))
    operation["responses"] = {**done, **_errors(errors)}
    return operation


def _errors(codes: tuple[int, ...]) -> Schema:
    line = {"application/json": {"schema": _ref(control.ErrorReply)}}
    return {str(code): {"description": _ERRORS[code], "content": line} for code in codes}


def _free() -> Schema:
    """No token is asked for."""
    return {"security": _OPEN_TO_ALL}


def _flag(name: str, value: str | bool) -> Schema:
    return {"type": "object", "properties": {name: {"const": value}}, "required": [name], "additionalProperties": False}


def _ref(kind: type[msgspec.Struct]) -> Schema:
    return {"$ref": _REF.format(name=kind.__name__)}


if __name__ == "__main__":
    print(text(), end="")
