"""Find algorithm settings that have no effect: a line for each key, with what would give it one.

The run is still valid, so these are warnings: at the start, and in `--dry-run`. Settings that contradict
each other are refused by the recipe. tests/trainer/test_inert.py compares gradients with and without each setting.
"""

from collections.abc import Iterator

from polyrl.config.recipe import AlgorithmConfig, CriticConfig

_ONE = (
    'the importance ratio is 1 with one update a step and old_logprobs = "recompute"; it moves with mini_batches or '
    'epochs above 1, or with old_logprobs = "engine"'
)
_OF_RATIO = ("ppo_clip", "gspo", "cispo")
"""Losses whose clips bound the importance ratio and nothing else; a loss of your own may use them otherwise."""


def inert(config: AlgorithmConfig) -> list[str]:
    """Return a line for each setting without effect, in a config whose derived keys the recipe has resolved."""
    return [
        f"algorithm.{key}: has no effect: {why}"
        for key, why in (*_of_ratio(config), *_of_kl(config), *_of_rest(config))
    ]


def _of_ratio(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if not config.ratio_is_one or config.loss not in _OF_RATIO:
        return
    if config.loss in ("gspo", "cispo"):
        yield "loss", f'{config.loss} has the gradient of "ppo_clip" here, since {_ONE}'
    for key in ("clip_low", "clip_high", "dual_clip"):
        if getattr(config, key) is not None:
            yield key, _ONE


def _of_kl(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if config.kl == "none":
        if config.kl_coef != AlgorithmConfig().kl_coef:
            yield "kl_coef", 'kl = "none"; expected "loss" or "reward" beside it'
        if config.kl_estimator is not None:
            yield "kl_estimator", 'kl = "none"; expected "loss" or "reward" beside it'
    elif config.kl_coef == 0:
        yield "kl", "kl_coef = 0, so that the reference is computed for nothing"
    elif config.kl == "loss" and config.kl_estimator == "k1":
        yield (
            "kl_estimator",
            'the gradient of k1 in the loss is zero on average; expected "k2" or "k3", or kl = "reward"',
        )
    elif config.kl == "reward" and config.kl_estimator != "k1":
        yield (
            "kl_estimator",
            f'the gradient of {config.kl_estimator} in the reward is nearly zero near the reference; expected "k1"',
        )


def _of_rest(config: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if not config.has_several_updates and config.critic.value_clip not in (0.0, CriticConfig().value_clip):
        yield (
            "critic.value_clip",
            "values do not move within a step of one update; they do with mini_batches or epochs above 1",
        )
    if config.overlong != "penalty":
        if config.overlong_penalty != AlgorithmConfig().overlong_penalty:
            yield "overlong_penalty", f'overlong = "{config.overlong}"; expected "penalty" beside it'
        if config.overlong_buffer_tokens is not None:
            yield "overlong_buffer_tokens", f'overlong = "{config.overlong}"; expected "penalty" beside it'
