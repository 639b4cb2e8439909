"""Where a judge is: a service at a URL with its key, or this run's own fleet, through its manager."""

import json
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from polyrl.errors import UserError
from polyrl.rewards.endpoint import Endpoint, key_of
from polyrl.rewards.facts import RunFacts
from polyrl.rewards.judging.questions import JudgeArgs
from polyrl.rewards.reward import RewardStops, RewardUnavailable
from polyrl.wire.credentials import TOKEN_FILES, client_tls, read_token_file

_ROUTE = "/chat/completions"


def endpoint(args: JudgeArgs, facts: RunFacts, connections: int) -> Endpoint:
    """Return the service to ask. Raises RewardStops for a key or a run that is not there."""
    if args.fleet:
        return _fleet(facts, connections)
    key = key_of(args.api_key_env)
    hint = (
        f"check args.url and args.model, and the key in {args.api_key_env}"
        if key
        else ("check args.url and args.model; args.api_key_env names the variable with its key, if it wants one")
    )
    return Endpoint(args.url.removesuffix("/").removesuffix(_ROUTE), key=key, hint=hint, connections=connections)


def _fleet(facts: RunFacts, connections: int) -> Endpoint:
    if not facts.run_dir:
        raise RewardStops("args.fleet: there is no run here whose fleet could be asked; give a url")
    folder = Path(facts.run_dir)
    try:
        url = str(json.loads((folder / "manager.json").read_text(encoding="utf-8"))["url"])
        key = read_token_file(folder / TOKEN_FILES["generate"])
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        raise RewardUnavailable(f"the manager of {folder} is not there yet") from error
    port = urlsplit(url).port
    tls: ssl.SSLContext | None = None
    if facts.manager_host:
        host = f"[{facts.manager_host}]" if ":" in facts.manager_host else facts.manager_host
        url = f"https://{host}:{port}"
        tls = client_tls(url, facts.manager_ca or None)
    url = url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    return Endpoint(f"{url}/v1", key=key, hint="args.fleet asks this run's manager", connections=connections, tls=tls)
