"""The settings of a recipe: one typed tree with defaults and validation. `polyrl train` reads it.

docs/reference/recipes.md explains every key. The sections `rounds`, `routing`, `seeding`, `hand_back`, `fleet_rules`,
`weight_delivery` and `scaling` are the scheduler's own configuration: the same structs that a scenario reads.

Not checked here: whether files and registered names exist. The code that opens them or looks them up reports that.
"""

import math
import re
import string
from ipaddress import ip_network
from itertools import pairwise
from pathlib import PurePath
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from polyrl.config.environments import EnvironmentsSection
from polyrl.config.plugins import is_own
from polyrl.config.rewards import ENVIRONMENT, REWARD_NAMES, RewardsSection, WeightedReward
from polyrl.scheduling.core.bounds import AtLeastOne, Count, NotNegative, Positive, Region, Share
from polyrl.scheduling.core.parameters import (
    FleetRules,
    HandBackConfig,
    ParallelismConfig,
    RoundsConfig,
    RoutingConfig,
    ScalingConfig,
    SeedingConfig,
    WeightDeliveryConfig,
)

Seed = Annotated[int, Meta(ge=0)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
FloatTokens = Annotated[float, Meta(ge=1, le=1e9)]

ARITHMETIC = "arithmetic"
"""The data source, and the reward, that ship with the package."""
HELD_OUT = "held-out"
"""The tasks of an environment that are not trained on."""
GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus_baseline")
"""Advantages that compare the samples of a group with each other."""
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed"]
KlEstimator = Literal["k1", "k2", "k3"]
SERVERS = ("vllm", "sglang")
"""Engines with a server of their own."""
DERIVED = (
    "algorithm.aggregation",
    "algorithm.kl_estimator",
    "algorithm.zero_variance",
    "algorithm.old_logprobs",
    "algorithm.correction",
)
"""Keys whose defaults depend on other keys. A run records their values, and which of them the user had not set."""
_OF_CHATS = ("conversation", "messages", "add_generation_prompt", "tokenize", "return_tensors", "return_dict")
_HOST = r"[A-Za-z0-9._-]{1,253}|[0-9a-fA-F:.]{2,45}"
_USUAL_CLIPS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
_USUAL_AGGREGATIONS: dict[str, Aggregation] = {"gspo": "seq-mean-token-mean", "dr_grpo": "fixed"}
"""The aggregation of a loss, or else of an advantage, whose paper does not use the mean over tokens."""
_USUAL_CORRECTIONS = {
    "tis-token": (0.0, 2.0),
    "tis-sequence": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "sequence-mask": (0.8, 1.25),
}


class ModelSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    path: str
    """A Hugging Face directory, or a model's name on the hub: weights that training starts from, and the tokenizer."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is bfloat16 on a GPU, where flash attention needs it, and float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gradient_checkpointing: bool = False
    max_context: Annotated[int, Meta(ge=2)] | None = None
    """The most tokens of prompt and answer together; none: the model's own limit."""


class TrainSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Literal["synchronous", "streaming", "async"] = "streaming"
    """`synchronous` generates all, then scores all, then trains; `streaming` does each as soon as it can; `async` also
    generates for later steps while it trains, with weights that are at most `max_staleness` versions behind."""
    max_staleness: AtLeastOne | None = None
    """The most versions that weights may be behind, in mode `async`; none: 1."""
    min_sample_size: Share = 0.0
    """In mode `async`: halve the lag when the effective share of a step's samples (`actor/effective_sample_size`) is
    below this; 0: never."""
    max_norm_growth: NotNegative = 0.0
    """In mode `async`: halve the lag when a step's gradient norm is more than this many times the usual; 0: never."""
    steps: AtLeastOne = 100
    seed: Seed = 0
    run_dir: str | None = None
    """Where everything about the run is written; none: runs/NAME."""
    micro_batch_tokens: AtLeastOne = 16_384
    """Tokens that go through the model at once while it trains."""
    min_micro_batch_samples: AtLeastOne | None = None
    """A micro-batch starts when this many samples, or `micro_batch_tokens` tokens, or the whole round are complete;
    none: 16 samples on a CPU; on a GPU only tokens count."""
    ranks: AtLeastOne = 1
    """The number of processes, on one machine or several, that train the model together, each with one GPU."""
    restarts: Annotated[int, Meta(ge=0, le=1000)] = 3
    """How often in a row, without a new step, the run goes on by itself after it has lost a rank."""
    replicas: AtLeastOne = 1
    """How many copies of the model the ranks hold: each copy is shared by `ranks` / `replicas` of them. A replica
    generates and trains on its own; gradients meet once a step."""
    context_ranks: AtLeastOne = 1
    """How many ranks train on the same samples, each with a run of their tokens: for samples too long for one GPU."""
    threads: Annotated[int, Meta(ge=1, le=1024)] | None = None
    """CPU threads for a model that is trained on the CPU; none: one for each core that the process may use, less those
    of `fleet.workers` and one for everything else; a single thread below ten million parameters."""
    local_generation: bool | None = None
    """Whether the trainer's own device generates too. Without workers nothing else does. None: true, except for
    `ranks` whose GPU has no room for a whole model beside its shard."""
    mismatch_warning: NotNegative = 0.01
    """Warn when an engine's log-probabilities are this many nats from the trainer's for the same weights
    (`actor/mismatch_kl/<engine>/0`); 0: never."""
    stop_at_reward: float | None = None
    """End when a step's mean reward reaches this."""
    price_usd_per_hour: NotNegative = 0.0
    """The price of the trainer's machine, for the ledger."""


class CriticConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The critic for advantage = "gae": a second model, which learns how much reward is still to come."""

    path: str = ""
    """A Hugging Face directory that it starts from; empty: model.path."""
    lr: Positive = 1e-5
    grad_clip: NotNegative = 1.0
    """The largest norm of its gradient; 0: any."""
    gamma: Annotated[float, Meta(gt=0, le=1)] = 1.0
    gae_lambda: Share = 1.0
    value_clip: NotNegative = 0.5
    """The clip of the value loss: beyond this distance from its old value, a value gets no gradient towards its
    return; 0: no clip."""


class AlgorithmConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The RL algorithm: advantage, loss, KL, correction and aggregation; docs/concepts/algorithms.md."""

    advantage: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce_plus_plus(_baseline), gae, or a function of your own: `module:function`."""
    loss: str = "ppo_clip"
    """ppo_clip, gspo, cispo, or a function of your own: `module:function`."""
    advantage_args: dict[str, Any] = {}
    """Keyword arguments of an advantage of your own."""
    baseline: Literal["mean", "optimal"] = "mean"
    """The reward that those of a group are compared with: their mean, or their mean weighted by the squares of the
    samples' gradients, which leaves the least variance (VCPO, arXiv 2602.17616). For advantages grpo and dr_grpo."""
    loss_args: dict[str, Any] = {}
    """Keyword arguments of a loss of your own."""
    clip_low: Share | None = None
    """None: 0.2; 0.0003 for gspo; 1, which is no bound, for cispo."""
    clip_high: NotNegative | None = None
    """None: 0.2; 0.0004 for gspo; 4 for cispo. Larger than `clip_low`: clip-higher."""
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    aggregation: Aggregation | None = None
    """None: as in the paper, which is "seq-mean-token-mean" for loss gspo, "fixed" for advantage dr_grpo with
    another loss, otherwise "token-mean"."""
    fixed_tokens: AtLeastOne | None = None
    """The divisor of a sample's summed loss, with aggregation `fixed`; none: rollout.max_new_tokens."""
    kl: Literal["none", "loss", "reward"] = "none"
    kl_estimator: KlEstimator | None = None
    """None: "k1" in the reward, where the gradient of k3 is nearly zero close to the reference; in the loss "k3", or
    "k2" with advantage reinforce_plus_plus_baseline."""
    kl_coef: NotNegative = 0.001
    reference: str = ""
    """A Hugging Face directory that KL is measured against; empty: the starting weights."""
    zero_variance: Literal["filter", "keep"] | None = None
    """The treatment of a group whose samples all have the same reward. None: "filter" where the advantage compares a
    group's samples with each other, since such a group teaches nothing; otherwise, and with kl = "reward", "keep"."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """The treatment of an answer that was cut off at rollout.max_new_tokens."""
    overlong_buffer_tokens: AtLeastOne | None = None
    """With `penalty`: over this many tokens before the cap, the penalty rises to `overlong_penalty`."""
    overlong_penalty: NotNegative = 1.0
    old_logprobs: Literal["recompute", "engine"] | None = None
    """The denominator of the importance ratio: the trainer's own log-probabilities, or the engine's. None: "engine"
    with train.mode "async", where clips then act on how far the policy has moved, unless a correction is chosen;
    otherwise "recompute"."""
    correction: Literal["none", "tis-token", "tis-sequence", "icepop", "sequence-mask"] | None = None
    """The correction for the trainer's old log-probabilities differing from the engine's. None: "tis-token" with
    train.mode "async" and `recompute`, since the engine's come from older weights there; otherwise "none"."""
    correction_low: Annotated[float, Meta(ge=0, le=1)] | None = None
    """With a mask, the lowest ratio that is trained on; none: 0.5 for icepop, 0.8 for sequence-mask."""
    correction_high: Annotated[float, Meta(ge=1)] | None = None
    """The cap of tis, the highest ratio with a mask; none: 2 for tis, 5 for icepop, 1.25 for sequence-mask."""
    max_mismatch: NotNegative = 3.0
    """The largest mean distance per token, in nats, between a sample's log-probabilities and the trainer's. It is
    multiplied by 1 + the number of versions that the worker's weights were behind. A sample beyond it is left out of
    the step, and its worker is named; 0: no bound."""
    scale_lr_by_sample_size: bool = False
    """Multiply the learning rate of an update by the square root of the effective share of its samples (VCPO, arXiv
    2602.17616). For train.mode "async"."""
    entropy_coef: NotNegative = 0.0
    mini_batches: AtLeastOne = 1
    """Optimizer updates in one pass over a step's groups; each trains on its share of the groups."""
    epochs: AtLeastOne = 1
    """Passes over a step's groups (verl's ppo_epochs, TRL's num_iterations), each with `mini_batches` updates."""
    critic: CriticConfig = CriticConfig()

    def __post_init__(self) -> None:
        if self.aggregation is None:
            by_advantage = _USUAL_AGGREGATIONS.get(self.advantage, "token-mean")
            force_setattr(self, "aggregation", _USUAL_AGGREGATIONS.get(self.loss, by_advantage))
        if self.kl_estimator is None and self.kl != "none":
            force_setattr(self, "kl_estimator", self._usual_estimator)
        if self.overlong == "penalty" and self.overlong_buffer_tokens is None:
            raise ValueError('overlong_buffer_tokens: missing, expected an integer >= 1 for overlong = "penalty"')
        if self.fixed_tokens is not None and self.aggregation != "fixed":
            raise ValueError(f'fixed_tokens: is for aggregation = "fixed" alone, not for "{self.aggregation}"')
        if self.reference and self.kl == "none":
            raise ValueError('reference: nothing is measured against it while kl = "none"')
        if self.dual_clip is not None and self.loss in ("gspo", "cispo"):
            raise ValueError(f'dual_clip: is for loss = "ppo_clip" alone, not for "{self.loss}"')
        if self.baseline == "optimal" and self.advantage not in ("grpo", "dr_grpo"):
            raise ValueError(
                f'baseline: expected "mean" with advantage = "{self.advantage}"; others are for grpo, dr_grpo'
            )
        if self.critic != CriticConfig() and self.advantage != "gae":
            raise ValueError(f'critic: is for advantage = "gae" alone, not for "{self.advantage}"')
        self._check_correction()

    def _check_correction(self) -> None:
        correction = self.correction
        if correction is None:  # the recipe chooses, and this is asked again
            return
        if correction != "none" and self.old_logprobs == "engine":
            raise ValueError('correction: expected "none", since with old_logprobs = "engine" the ratio has it already')
        if correction == "none" and self.correction_high is not None:
            raise ValueError('correction_high: nothing is corrected while correction = "none"')
        if correction not in ("icepop", "sequence-mask") and self.correction_low is not None:
            raise ValueError(
                f'correction_low: is for correction = "icepop" and "sequence-mask", not for "{correction}"'
            )

    @property
    def _usual_estimator(self) -> KlEstimator:
        if self.kl == "reward":
            return "k1"
        return "k2" if self.advantage == "reinforce_plus_plus_baseline" else "k3"

    @property
    def ratio_is_one(self) -> bool:
        """Whether the importance ratio is 1 for every token: the one update of a step starts from its own weights."""
        return self.old_logprobs != "engine" and not self.has_several_updates

    @property
    def has_several_updates(self) -> bool:
        """Whether the weights move within a step."""
        return self.mini_batches > 1 or self.epochs > 1

    @property
    def clip_range(self) -> tuple[float, float]:
        """`clip_low` and `clip_high`, or the defaults of the loss."""
        low, high = _USUAL_CLIPS.get(self.loss, (0.2, 0.2))
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    @property
    def correction_range(self) -> tuple[float, float]:
        """`correction_low` and `correction_high`, or the defaults of the correction."""
        low, high = _USUAL_CORRECTIONS.get(self.correction or "none", (0.0, math.inf))
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )


class OptimizerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer of the float32 weights: AdamW, or one of your own."""

    kind: str = "adamw"
    """adamw; adamw8bit, which keeps the moments in a byte an element and needs `pip install 'polyrl[adam8bit]'`; or a
    torch optimizer of your own: `module:Class`."""
    args: dict[str, Any] = {}
    """Keyword arguments of an optimizer of your own, beside `lr`."""
    offload: bool = False
    """Keep moments, and float32 copies of half-precision weights, in host memory: slower, with the same result."""
    lr: Positive = 1e-6
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    grad_clip: NotNegative = 1.0
    """The largest norm of a gradient; 0: any."""
    warmup_steps: Count = 0
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after the warm-up: constant, or falling to zero at train.steps."""

    def __post_init__(self) -> None:
        if self.kind not in ("adamw", "adamw8bit") and not is_own(self.kind):
            raise ValueError(f'kind: got "{self.kind}", expected adamw, adamw8bit or module:Class')
        if self.kind != "adamw" and self.offload:
            raise ValueError('offload: is for kind = "adamw" alone; the state of others stays on the device')
        if self.args and not self.is_own:
            raise ValueError(f'args: is for an optimizer of your own, not for "{self.kind}"')
        if self.is_own and (self.betas, self.eps) != ((0.9, 0.999), 1e-8):
            raise ValueError(f"betas: it and eps are AdamW's; expected what {self.kind} takes, in optimizer.args")

    @property
    def is_own(self) -> bool:
        """Whether `kind` names an optimizer of the user's own."""
        return is_own(self.kind)


class LoraSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA: train low-rank changes to some matrices, and leave the base weights unchanged;
    docs/concepts/training-step.md#lora-and-a-smaller-optimizer."""

    rank: Annotated[int, Meta(ge=0, le=1024)] = 0
    """The rank of the changes. 0: no LoRA, all weights are trained."""
    alpha: Positive | None = None
    """Changes are scaled by alpha / rank; none: twice the rank."""
    dropout: BelowOne = 0.0
    """The dropout on the input of the changes during training."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """The layers to change, by the end of their names; or all matrices but the embedding and the head."""
    publish: Literal["merged", "adapter"] = "merged"
    """Send the fleet whole weights, or only the changes, which workers merge with their own base."""

    def __post_init__(self) -> None:
        if not self.rank and any((self.alpha, self.dropout, self.targets != "all-linear", self.publish != "merged")):
            raise ValueError("rank: is 0, which is no LoRA; expected at least 1 beside the other keys")
        if not self.targets:
            raise ValueError('targets: got an empty list, expected names of layers or "all-linear"')

    @property
    def scaling(self) -> float:
        return 2.0 if self.alpha is None else self.alpha / self.rank


class ImposedLengthsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Answers of drawn lengths instead of the model's own, so that any model shows a realistic tail."""

    kind: Literal["off", "lognormal", "quantiles"] = "off"
    median: FloatTokens = 650.0
    sigma: Annotated[float, Meta(ge=0, le=10)] = 0.9
    """The standard deviation of the length's logarithm, for `lognormal`."""
    quantiles: tuple[tuple[Share, FloatTokens], ...] = ()
    """[probability, tokens], both rising, for `quantiles`. Lengths above rollout.max_new_tokens are cut to it."""
    correlation: Share = 0.2
    """Within-prompt correlation of lengths (Gaussian copula)."""

    def __post_init__(self) -> None:
        if self.kind == "quantiles" and len(self.quantiles) < 2:
            raise ValueError(f"quantiles: expected at least two [probability, tokens] pairs, got {len(self.quantiles)}")
        for index, (earlier, later) in enumerate(pairwise(self.quantiles)):
            if later[0] <= earlier[0] or later[1] < earlier[1]:
                raise ValueError(f"quantiles.{index + 1}: {list(later)} does not rise above {list(earlier)}")


class RolloutSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How answers are drawn."""

    max_new_tokens: AtLeastOne = 1024
    temperature: Annotated[float, Meta(gt=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    """0: all."""
    min_p: Share = 0.0
    stop: tuple[str, ...] = ()
    """Text that ends an answer, beside the model's own end of text."""
    impose_lengths: ImposedLengthsSection = ImposedLengthsSection()

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise ValueError(f"stop.{self.stop.index('')}: got an empty text, which every answer has at once")


class ArithmeticTask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size of the generated problems; docs/concepts/data.md."""

    min_terms: Annotated[int, Meta(ge=2, le=26)] = 3
    max_terms: Annotated[int, Meta(ge=2, le=26)] = 8
    max_term: Annotated[int, Meta(ge=1, le=999)] = 5

    def __post_init__(self) -> None:
        if self.max_terms < self.min_terms:
            raise ValueError(f"max_terms: {self.max_terms} is below min_terms = {self.min_terms}")


class DomainFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of task: its data, its reward, and its share of every step."""

    source: str | None = None
    """A .jsonl, .json, .csv or .parquet file; a directory of `datasets` or of such files, with #SPLIT where it is not
    "train"; a data set of the Hugging Face hub; "arithmetic"; or a function of your own: `module:function`."""
    source_args: dict[str, Any] = {}
    """Keyword arguments of a source of your own."""
    reward: str | tuple[str, ...] | None = None
    """arithmetic, math, code, judge, reward_model, or a function of your own: `module:function`; or several, whose
    scores are added up. None: all of rewards.functions; where there are none, the source's own, if it has one. With an
    environment: its own reward is called environment, and counts beside all of rewards.functions, or if it is named."""
    prompts_per_step: AtLeastOne = 32
    validation: str | dict[str, str] | None = None
    """Prompts for validation: a place like `source`, or several as a table of names and places; none: "arithmetic" has
    its own split, others have none. With an environment: rows like those of `source`; or "held-out", its tasks after
    the first `num_prompts`, which are trained on."""
    validation_args: dict[str, Any] = {}
    """Keyword arguments of sources of your own that `validation` names. With "held-out": of the environment, over
    `environment_args`; validation then has its first tasks, so that a seed or a split in them must differ."""
    prompt_key: str = "prompt"
    """The column with the prompt, or with a list of chat messages; `a.b` is column b within column a."""
    answer_key: str = "answer"
    """The column with the expected answer, which the reward compares with; `a.b` is column b within column a."""
    template: str = "{prompt}"
    """The prompt as the model sees it: text with {prompt} and any other column in braces."""
    chat: bool = False
    """Wrap the prompt with the tokenizer's chat template. Rows of messages always are."""
    system: str = ""
    """A system message before the prompt; needs `chat`."""
    chat_template_kwargs: dict[str, Any] = {}
    """Arguments of the tokenizer's chat template beside the messages: enable_thinking = false, for example."""
    max_prompt_tokens: AtLeastOne | None = None
    """Rows with a longer prompt are left out, and counted; none: the context less the longest answer."""
    num_prompts: AtLeastOne | None = None
    """Use only this many rows, or tasks of an environment, from the first; none: all of them."""
    arithmetic: ArithmeticTask = ArithmeticTask()
    environment: str = ""
    """Train on the episodes of an environment: a package by name (verifiers, textarena, reasoning-gym, skyrl-gym,
    openenv), or one of your own, `module:Class`. Its rows are `source`, or the environment brings its tasks."""
    environment_args: dict[str, Any] = {}
    """Keyword arguments of the environment."""

    def check(self) -> None:
        """Check the rules that involve several keys. Raises ValueError, `key: reason`."""
        if not self.source and not self.environment:
            raise ValueError('source: missing, expected a file, a directory or "arithmetic"; or an environment')
        self._check_environment()
        if self.source_args and not is_own(self.source or ""):
            raise ValueError(f'source_args: is for a source of your own, not for "{self.source}"')
        places = self.validation.values() if isinstance(self.validation, dict) else (self.validation or "",)
        if self.validation_args and not any(is_own(one) or (self.environment and one == HELD_OUT) for one in places):
            raise ValueError("validation_args: is for a source of your own, and data.validation names none")
        if not self.reward and self.reward is not None:
            raise ValueError(f"reward: got none, expected {REWARD_NAMES}")
        if self.system and not self.chat:
            raise ValueError("system: is for chat = true alone; otherwise the template is the place for it")
        if isinstance(self.validation, dict) and not all(self.validation):
            raise ValueError("validation: a set has no name, expected what it is called in metrics")
        ours = [name for name in self.chat_template_kwargs if name in _OF_CHATS]
        if ours:
            raise ValueError(f"chat_template_kwargs.{ours[0]}: is set by PolyRL; leave it out")
        _check_template("template", self.template)

    def _check_environment(self) -> None:
        if not self.environment:
            if self.environment_args:
                raise ValueError("environment_args: is for data.environment, which is missing")
            return
        if self.source == ARITHMETIC:
            raise ValueError('source: "arithmetic" has prompts of its own; an environment wants rows, or none')
        places = self.validation.values() if isinstance(self.validation, dict) else (self.validation,)
        if self.source and HELD_OUT in places:
            raise ValueError(f'validation: "{HELD_OUT}" is for tasks that an environment brings; expected rows')
        if not self.source and any(one not in (None, HELD_OUT) for one in places):
            raise ValueError(f'validation: the environment brings its tasks; expected "{HELD_OUT}"')


class DomainSection(DomainFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name: got an empty text, expected what the domain is called in metrics")
        self.check()

    @property
    def validation_sets(self) -> dict[str, str]:
        """The sources of validation prompts, by their names in metrics. A single source has the domain's name."""
        if isinstance(self.validation, dict):
            return self.validation
        place = ARITHMETIC if self.validation is None and self.source == ARITHMETIC else self.validation
        return {} if place is None else {self.name: place}


class DataSection(DomainFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A single domain, with its keys in this section, or several as `[[data.domains]]`."""

    domains: tuple[DomainSection, ...] = ()
    shuffle_seed: Seed | None = None
    """None: train.seed."""
    num_epochs: AtLeastOne | None = None
    """The number of passes over the data; the run ends after the last. None: as many as the steps need."""

    def __post_init__(self) -> None:
        if not self.domains:
            self.check()
            return
        nothing_said = DomainFields()
        for key in DomainFields.__struct_fields__:
            if getattr(self, key) != getattr(nothing_said, key):
                raise ValueError(f"{key}: say it in each of data.domains, or leave data.domains out")
        names = [domain.name for domain in self.domains]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ValueError(f"domains.{index}.name: {name!r} is there twice")

    @property
    def all_domains(self) -> tuple[DomainSection, ...]:
        """The domains in order, whichever way they were written."""
        if self.domains:
            return self.domains
        only = {key: getattr(self, key) for key in DomainFields.__struct_fields__}
        place = self.environment or self.source or ""
        own = place.rpartition(":")[2] if is_own(place) else ""
        return (DomainSection(name=own or PurePath(place.partition("#")[0]).stem or "data", **only),)


class ValidationSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Validation every few steps, on prompts that are not trained on."""

    every_steps: Count = 0
    """Validate after every so many steps; 0: only at the start, if `at_start`."""
    at_start: bool | None = None
    """Also before the first step. None: true; with several ranks, as train.local_generation."""
    num_prompts: AtLeastOne = 64
    """The number of prompts from each set; the first ones are used."""
    solved_above: float = 0.5
    """pass@k counts an answer as right if its reward is above this."""
    pass_at: tuple[AtLeastOne, ...] = (1,)
    """The values of k for pass@k. Each prompt gets `num_samples` answers, or as many as the largest k."""
    num_samples: AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    """None: rollout.temperature."""

    def __post_init__(self) -> None:
        if not self.pass_at:
            raise ValueError("pass_at: got an empty list, expected at least one k")
        if self.num_samples is not None and self.num_samples < max(self.pass_at):
            raise ValueError(f"num_samples: {self.num_samples} is below {max(self.pass_at)}, the largest of pass_at")

    def is_due(self, version: int) -> bool:
        return self.every_steps > 0 and version % self.every_steps == 0 if version else bool(self.at_start)

    @property
    def samples_per_prompt(self) -> int:
        return max(self.pass_at) if self.num_samples is None else self.num_samples


class FleetSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers that the run starts and ends, on this machine or elsewhere. Others join from anywhere."""

    workers: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """The number of workers; with `scaling.enabled`, the number at the start."""
    provider: str = "local"
    """Where they run: local, command, slurm, ray, or a provider of your own: `module:Class`."""
    provider_args: dict[str, Any] = {}
    """Settings of the provider; docs/guides/providers.md."""
    replace: bool = True
    """Start a worker again that has ended, after a pause that grows with every quick end."""
    engine: str = "builtin"
    """builtin, vllm, sglang, or an engine of your own: `module:Class`."""
    engine_python: str = ""
    """For vllm and sglang: the environment, or its Python, with the server installed; empty: PolyRL's own, or the one
    that `make engines` installs."""
    tensor_parallel: AtLeastOne = 1
    """For vllm and sglang: the devices that share each server's model; with `parallelism.enabled`, at first."""
    settings: dict[str, Any] = {}
    """Engine settings, as for `polyrl worker --engine-config`; keyword arguments of an engine of your own."""
    wait: bool = False
    """Start training only when all of these workers have joined. For runs that are to be compared."""
    price_usd_per_hour: NotNegative = 0.0
    """The price of one worker, for the ledger."""
    spot: bool = False
    region: Region = ""
    """The name of the place that these workers are in, if it is far from the trainer: a version then comes over the
    long link once; docs/concepts/weights.md#regions."""

    @property
    def num_devices(self) -> int:
        """The devices of these workers, all together."""
        return self.workers * self.tensor_parallel

    def __post_init__(self) -> None:
        if self.engine not in ("builtin", *SERVERS) and not is_own(self.engine):
            raise ValueError(f'engine: got "{self.engine}", expected builtin, vllm, sglang or module:Class')
        if self.engine_python and self.engine not in SERVERS:
            raise ValueError(f'engine_python: is for engine = "vllm" and "sglang"; {self.engine} has no server')


class ManagerSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """0.0.0.0 for workers on other machines."""
    address: str = ""
    """The name or address that other machines dial; empty: an address of this machine. For names that stay when the
    machine changes, such as a Service of Kubernetes."""
    port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    """0: any free port. None: 5000, or any free port if another run has 5000."""
    tls_cert: str = ""
    """The file of the TLS certificate (PEM) that workers verify; empty: no encryption."""
    tls_key: str = ""
    """The file of the certificate's private key."""
    ca: str = ""
    """A file of certificate authorities to trust, for a certificate that the system's authorities did not sign."""
    max_price_usd_per_hour: Annotated[float, Meta(ge=0, le=1e6)] = 1000.0
    """A worker that reports a higher price is refused."""
    max_starting_s: Annotated[float, Meta(ge=0, le=1e6)] = 3600.0
    """The most startup time before joining that the ledger counts for a worker, however long the worker reports."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            missing = "tls_key" if self.tls_cert else "tls_cert"
            raise ValueError(f"{missing}: missing, expected a file; a certificate and its key belong together")
        if self.ca and not self.tls_cert:
            raise ValueError("ca: nothing is checked against it without tls_cert")
        if self.address and self.tls_cert:
            raise ValueError("address: peers dial a name of tls_cert; leave one of the two out")
        if self.address and not re.fullmatch(_HOST, self.address):
            raise ValueError(f"address: got {self.address!r}, expected a name or an address, without a port")


class WeightsSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How weights travel to the fleet."""

    interfaces: tuple[str, ...] = ()
    """Networks, written as CIDR, on whose local addresses weights are served; empty: where the manager listens."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The first of `groups` consecutive ports; 0: any free ports."""
    groups: Annotated[int, Meta(ge=1, le=64)] = 1
    """The number of ports per interface. Workers are spread over them."""
    egress_mb_s: Positive | None = None
    """The most megabytes a second that this process sends; none: no limit."""
    hash: Literal["xxh3-128", "blake3"] = "xxh3-128"
    """The checksum of chunks that come from the trainer alone or stay on its machine. Where workers relay chunks to
    other machines the checksum is always blake3, since xxh3-128 can be forged."""
    mooncake: Literal["", "tcp", "rdma"] = ""
    """Offer full versions through mooncake's transfer engine too, to workers that are started with --mooncake."""
    every_node: bool = True
    """Where the ranks are on several nodes, each serves its share of a version, so workers must reach all of them. Off,
    and with TLS, mooncake or a manager on loopback: the first node serves everything, and holds whole versions."""
    encode_on: Literal["host", "device"] = "host"
    """Where deltas are encoded. The trainer's GPU is ten times as fast, but needs memory for one more copy of the
    weights, and the trainer waits for it; the host encodes while training goes on."""


class CheckpointSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Checkpoints, from which a run resumes after its trainer was killed; docs/concepts/checkpoints.md."""

    enabled: bool = True
    """Off: a run cannot be resumed after its trainer died."""
    every_steps: AtLeastOne = 10
    """Steps between full checkpoints, which are written while the next steps run. In between, a log records what each
    step was trained on, and a resumed run trains those steps again."""
    keep_last: AtLeastOne = 2
    keep_every: AtLeastOne | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    keep_best: str = ""
    """Also keep the checkpoint that is best by a validation metric, validation/reward/mean for example."""


class OwnTracker(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tracker of your own."""

    tracker: str
    """`module:Class`: called with the run's directory and the first step, it has `log(step, metrics)` and `close()`."""
    args: dict[str, Any] = {}
    """Keyword arguments of the tracker."""


class TrackSection(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trackers that receive the metrics, beside metrics.jsonl, which is always written."""

    tensorboard: bool = False
    wandb: Literal["off", "offline", "online"] = "off"
    project: str = "polyrl"
    trackers: tuple[OwnTracker, ...] = ()
    """Trackers of your own."""
    samples_gb: NotNegative = 1.0
    """Disk space for the samples of older steps, for `polyrl samples`; the oldest are deleted first. 0: keep none."""
    samples_every_steps: Annotated[int, Meta(ge=0, le=1_000_000_000)] = 10
    """TensorBoard and W&B get a table of a step's answers every so many steps; 0: never."""


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    about: str = ""
    modules: str = ""
    """A folder in which `module:name` is looked up, after Python's own path; empty: the folder of the recipe's file."""
    model: ModelSection
    train: TrainSection = TrainSection()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraSection = LoraSection()
    rollout: RolloutSection = RolloutSection()
    data: DataSection
    validation: ValidationSection = ValidationSection()
    rewards: RewardsSection = RewardsSection()
    fleet: FleetSection = FleetSection()
    manager: ManagerSection = ManagerSection()
    weights: WeightsSection = WeightsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    track: TrackSection = TrackSection()
    rounds: RoundsConfig = RoundsConfig()
    routing: RoutingConfig = RoutingConfig()
    seeding: SeedingConfig = SeedingConfig()
    hand_back: HandBackConfig = HandBackConfig()
    parallelism: ParallelismConfig = ParallelismConfig()
    fleet_rules: FleetRules = FleetRules()
    weight_delivery: WeightDeliveryConfig = WeightDeliveryConfig()
    scaling: ScalingConfig = ScalingConfig()
    environments: EnvironmentsSection = EnvironmentsSection()
    derived: tuple[str, ...] = ()
    """Written by a run: keys that were not set, so that a run that is resumed with another loss, advantage or kl
    derives them again. Leave it out of a recipe of your own."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"name: got {self.name!r}, expected a name that a directory can have")
        if self.train.max_staleness is not None and self.train.mode != "async":
            raise ValueError(f'train.max_staleness: is for train.mode = "async" alone, not for "{self.train.mode}"')
        self._check_guards()
        self._choose_who_generates()
        self._choose_zero_variance()
        self._choose_old_logprobs()
        self._choose_correction()
        self._check_who_generates()
        self._check_tokens()
        self._check_groups()
        self._check_validation()
        self._check_best()
        self._check_ranks()
        self._check_mooncake()
        self._check_fleet()
        self._check_parallelism()
        self._check_price()
        self._check_rewards()

    # Defaults that depend on other keys are filled in here, so that a printed recipe shows them.

    def _choose_who_generates(self) -> None:
        """Fill in `local_generation` and `at_start`. With several ranks, memory decides (run/plan.py)."""
        train, validation = self.train, self.validation
        if train.local_generation is None and (train.ranks == 1 or train.mode == "synchronous"):
            force_setattr(self, "train", replace(train, local_generation=True))
        if validation.at_start is None and train.ranks == 1:
            force_setattr(self, "validation", replace(validation, at_start=True))

    def _choose_zero_variance(self) -> None:
        algorithm = self.algorithm
        if algorithm.zero_variance is None:
            teaches_nothing = algorithm.advantage in GROUP_ADVANTAGES and algorithm.kl != "reward"
            chosen = replace(algorithm, zero_variance="filter" if teaches_nothing else "keep")
            force_setattr(self, "algorithm", chosen)

    def _check_fleet(self) -> None:
        if self.parallelism.enabled and self.fleet.provider != "local":
            raise ValueError('fleet.provider: expected "local" with parallelism.enabled, which divides this machine')
        if self.fleet.workers and self.fleet.engine in SERVERS and self.lora.publish == "adapter":
            raise ValueError(
                f'lora.publish: expected "merged", since {self.fleet.engine} servers (fleet.engine) merge none'
            )
        has_episodes = any(domain.environment for domain in self.data.all_domains)
        if has_episodes and self.fleet.engine in SERVERS and self.fleet.settings.get("after_install") == "keep":
            raise ValueError(
                'fleet.settings.after_install: expected "recompute" with data.environment: with "keep" a server has no '
                "prefix cache, and computes each turn's whole conversation anew"
            )

    def _check_parallelism(self) -> None:
        fleet, planned = self.fleet, self.parallelism
        if fleet.tensor_parallel > 1 and fleet.engine not in SERVERS:
            raise ValueError(f'fleet.tensor_parallel: is for fleet.engine = "vllm" and "sglang", not "{fleet.engine}"')
        if not planned.enabled:
            return
        if fleet.engine not in SERVERS or fleet.num_devices < 2:
            raise ValueError(
                f'parallelism.enabled: {fleet.workers} workers of engine "{fleet.engine}" (fleet); expected servers, '
                "vllm or sglang, with two devices or more in all (fleet.workers times fleet.tensor_parallel)"
            )
        if self.scaling.enabled:
            raise ValueError(
                "scaling.enabled: expected false with parallelism.enabled, which uses all devices of fleet"
            )
        for key in ("engines", "num_devices", "start_tp", "model"):
            if getattr(planned, key) != getattr(ParallelismConfig(), key):
                raise ValueError(f"parallelism.{key}: follows from fleet and model; leave it out")

    def _check_mooncake(self) -> None:
        if self.weights.mooncake and self.manager.tls_cert:
            raise ValueError("weights.mooncake: is not encrypted, and needs no key; leave manager.tls_cert out")

    def _check_price(self) -> None:
        price, most = self.fleet.price_usd_per_hour, self.manager.max_price_usd_per_hour
        if price > most:
            raise ValueError(
                f"fleet.price_usd_per_hour: {price:g} is above manager.max_price_usd_per_hour = {most:g}, "
                "and no worker would be let in"
            )

    def _check_guards(self) -> None:
        """Refuse guards against stale samples where no sample is stale, and bounds that cannot act."""
        guards = {
            "train.min_sample_size": self.train.min_sample_size,
            "train.max_norm_growth": self.train.max_norm_growth,
            "algorithm.scale_lr_by_sample_size": self.algorithm.scale_lr_by_sample_size,
        }
        for key, is_set in guards.items():
            if is_set and self.train.mode != "async":
                raise ValueError(f'{key}: is for train.mode = "async" alone, not for "{self.train.mode}"')
        if 0 < self.train.max_norm_growth <= 1:
            raise ValueError(
                f"train.max_norm_growth: got {self.train.max_norm_growth:g}, expected 0 or a number above 1: half of "
                "all steps are above the median"
            )

    def _choose_old_logprobs(self) -> None:
        algorithm = self.algorithm
        if algorithm.old_logprobs is None:
            bounds = (algorithm.correction_low, algorithm.correction_high)
            corrects = algorithm.correction not in (None, "none") or bounds != (None, None)
            chosen = "engine" if self.max_staleness > 0 and not corrects else "recompute"
            force_setattr(self, "algorithm", replace(algorithm, old_logprobs=chosen))

    def _choose_correction(self) -> None:
        if self.algorithm.correction is None:
            older = self.max_staleness > 0 and self.algorithm.old_logprobs == "recompute"
            try:
                chosen = replace(self.algorithm, correction="tis-token" if older else "none")
            except ValueError as error:  # a bound for what is not corrected
                raise ValueError(f"algorithm.{error}") from error
            force_setattr(self, "algorithm", chosen)

    def _check_who_generates(self) -> None:
        if self.train.mode == "synchronous" and self.train.local_generation is False:
            raise ValueError("train.local_generation: expected true, since a synchronous run generates there")

    def _check_ranks(self) -> None:
        ranks, replicas = self.train.ranks, self.train.replicas
        if ranks % replicas:
            raise ValueError(f"train.replicas: {replicas}, and train.ranks is {ranks}; expected a divisor of that")
        context = self.train.context_ranks
        if ranks // replicas % context:
            raise ValueError(
                f"train.context_ranks: {context}, and {ranks // replicas} ranks share a copy of the model; expected a "
                "divisor of that"
            )
        if context > 1 and self.lora.dropout:
            raise ValueError(
                "lora.dropout: expected 0 with train.context_ranks, which divide the samples it is drawn for"
            )
        if ranks > replicas and self.optimizer.kind != "adamw":
            raise ValueError(
                'train.ranks: expected 1, since optimizer.kind other than "adamw" is for one rank, or as many as '
                "train.replicas; ranks divide the optimizer's state already"
            )
        if ranks > replicas and self.algorithm.baseline == "optimal":
            raise ValueError(
                'algorithm.baseline: expected "mean", since ranks that share a model (train.ranks) have no gradient of '
                "a single sample"
            )
        if ranks > replicas and self.weights.encode_on == "device":
            raise ValueError('weights.encode_on: expected "host", since train.ranks divide the weights')

    def _check_validation(self) -> None:
        every, names = self.validation.every_steps, self.validation_names
        if every and not names:
            raise ValueError(
                f"validation.every_steps: {every}, and no domain has prompts for validation; expected data.validation, "
                "a file of prompts that are not trained on"
            )
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ValueError(f"data.validation: two sets are called {twice[0]!r}, expected a name of its own for each")

    @property
    def validation_names(self) -> list[str]:
        """The names of all sets of prompts for validation."""
        return [name for domain in self.data.all_domains for name in domain.validation_sets]

    @property
    def validates(self) -> bool:
        """Whether any version is validated."""
        return bool(self.validation_names and (self.validation.at_start or self.validation.every_steps))

    def _check_rewards(self) -> None:
        has_episodes = any(domain.environment for domain in self.data.all_domains)
        unused = [one.title for one in self.rewards.functions if not has_episodes or one.function != ENVIRONMENT]
        for index, domain in enumerate(self.data.all_domains):
            key = f"data.domains.{index}.reward" if self.data.domains else "data.reward"
            try:
                chosen = self.rewards_of(domain)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from error
            used = [one.title for one in chosen]
            self.rewards.check_place(chosen)
            unused = [one for one in unused if one not in used]
        if unused:
            raise ValueError(f"rewards.functions: no domain uses {unused[0]}; name it in data.reward, or leave it out")

    def _check_best(self) -> None:
        wanted, validation = self.checkpoint.keep_best, self.validation
        if not wanted:
            return
        if not validation.every_steps:
            raise ValueError("checkpoint.keep_best: nothing is compared while validation.every_steps = 0")
        places = ["validation", *(f"validation/{name}" for name in self.validation_names)]
        known = [f"{place}/{metric}" for place in places for metric in ("reward/mean", *_of_attempts(validation))]
        if wanted not in known:
            raise ValueError(f'checkpoint.keep_best: got "{wanted}", expected {", ".join(known)}')

    def _check_groups(self) -> None:
        algorithm, num_samples = self.algorithm, self.rounds.samples_per_prompt
        if algorithm.advantage in GROUP_ADVANTAGES and num_samples < 2:
            raise ValueError(f"rounds.samples_per_prompt: expected at least 2, for {algorithm.advantage}")
        if num_samples < 2 and algorithm.zero_variance == "filter":
            raise ValueError(
                'algorithm.zero_variance: expected "keep", since rounds.samples_per_prompt = 1: no group differs'
            )
        num_groups = sum(domain.prompts_per_step for domain in self.data.all_domains)
        if algorithm.mini_batches > num_groups:
            raise ValueError(
                f"algorithm.mini_batches: {algorithm.mini_batches} is more than the {num_groups} groups of a step"
            )

    def _check_tokens(self) -> None:
        longest = self.rollout.max_new_tokens
        context = self.model.max_context
        if context is not None and context <= longest:
            raise ValueError(f"model.max_context: expected room for a prompt beside rollout.max_new_tokens = {longest}")
        if self.train.micro_batch_tokens < longest:
            raise ValueError(f"train.micro_batch_tokens: expected at least rollout.max_new_tokens, {longest}")
        buffer = self.algorithm.overlong_buffer_tokens
        if buffer is not None and buffer > longest:
            raise ValueError(
                f"algorithm.overlong_buffer_tokens: {buffer} is more than rollout.max_new_tokens, {longest}"
            )

    def rewards_of(self, domain: DomainSection) -> tuple[WeightedReward, ...]:
        """Return the functions that score a domain's answers or episodes; none where an environment's own reward is
        all."""
        if domain.environment:
            return self.rewards.of_episodes(domain.reward, has_rows=bool(domain.source))
        return self.rewards.chosen(domain.reward, ARITHMETIC if domain.source == ARITHMETIC else None)

    def environment_of(self, domain: DomainSection) -> str:
        """Return the name under which hosts play a domain's environment; empty for a domain of single answers."""
        shared = sum(one.environment == domain.environment for one in self.data.all_domains) > 1
        return f"{domain.environment}/{domain.name}" if domain.environment and shared else domain.environment

    @property
    def max_staleness(self) -> int:
        """How many versions behind a step's own its tokens may be; 0 is strictly on-policy."""
        if self.train.mode != "async":
            return 0
        return 1 if self.train.max_staleness is None else self.train.max_staleness

    @property
    def weights_hash(self) -> Literal["xxh3-128", "blake3"]:
        """The hash of weight chunks, chosen by who could change them on the way: over https no worker relays."""
        are_relayed = self.weight_delivery.relay and not self.manager.tls_cert
        stay_here = _is_loopback(self.manager.host) and all(map(_is_loopback, self.weights.interfaces))
        return "blake3" if are_relayed and not stay_here else self.weights.hash

    @property
    def run_dir(self) -> str:
        return f"runs/{self.name}" if self.train.run_dir is None else self.train.run_dir


def _of_attempts(validation: ValidationSection) -> list[str]:
    return [f"pass@{k}" for k in validation.pass_at]


def _is_loopback(network: str) -> bool:
    """Return whether a host, or a network written as CIDR, is loopback."""
    try:
        return ip_network(network, strict=False).is_loopback
    except ValueError:
        return network == "localhost"


def _check_template(key: str, template: str) -> None:
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"{key}: {error}; a brace that is meant as one is doubled") from error
    if not any(name.partition(".")[0].partition("[")[0] == "prompt" for name in names):
        raise ValueError(f"{key}: has no {{prompt}}, expected the place where the prompt goes")
    strange = [name for name in names if not _is_column(name)]
    if strange:
        raise ValueError(f"{key}: got {{{strange[0]}}}, expected the name of a column; a brace meant as one is doubled")


def _is_column(name: str) -> bool:
    """Return whether this is a column's name, or the path of a column within a column: `extra_info.hints.0`."""
    first, *others = name.split(".")
    return first.isidentifier() and all(one.isidentifier() or one.isdecimal() for one in others)
