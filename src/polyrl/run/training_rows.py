"""The data that each domain of a recipe trains on: for a run, and for commands that show its answers afterwards."""

from polyrl.config.recipe import DomainSection, Recipe
from polyrl.data.sources import Source, open_training
from polyrl.data.tokens import ModelTokenizer
from polyrl.errors import ConfigError
from polyrl.rewards.reward import needs_answer


def domain_keys(recipe: Recipe) -> list[str]:
    """Return the dotted key of each domain's settings."""
    domains = recipe.data.domains
    return [f"data.domains.{number}" for number in range(len(domains))] if domains else ["data"]


def prompt_room(recipe: Recipe, model_context: int | None) -> int | None:
    """Return the tokens that a context leaves for a prompt beside the longest answer; None: any number."""
    limits = [one for one in (recipe.model.max_context, model_context) if one is not None]
    if not limits:
        return None
    room = min(limits) - recipe.rollout.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"rollout.max_new_tokens: {recipe.rollout.max_new_tokens} leaves no room for a prompt, "
            f"expected less than the context of {min(limits)} tokens ({recipe.model.path})"
        )
    return room


def open_rows(recipe: Recipe) -> list[Source]:
    """Open each domain's data to show answers with it: no reward is looked for. Raises UserError."""
    tokenizer = ModelTokenizer(recipe.model.path)
    room = prompt_room(recipe, tokenizer.max_context)
    named = zip(recipe.data.all_domains, domain_keys(recipe), strict=True)
    return [open_rows_of(recipe, domain, tokenizer, room, key, one_step=False) for domain, key in named]


def longest_prompt(domain: DomainSection, room: int | None) -> int | None:
    limits = [one for one in (domain.max_prompt_tokens, room) if one is not None]
    return min(limits) if limits else None


def open_rows_of(
    recipe: Recipe, domain: DomainSection, tokenizer: ModelTokenizer, room: int | None, key: str, *, one_step: bool
) -> Source:
    return open_training(
        domain,
        tokenizer,
        seed=recipe.train.seed if recipe.data.shuffle_seed is None else recipe.data.shuffle_seed,
        max_tokens=longest_prompt(domain, room),
        needs_answer=needs_answer(recipe.rewards_of(domain)),
        key=key,
        enough=domain.prompts_per_step if one_step else None,
    )
