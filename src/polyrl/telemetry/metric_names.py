"""Every metric that we name: its unit and its meaning, as data. The tables of docs/reference/metrics.md
are made of it.

Rules kept here: a name means one thing in the file, in trackers, in plots and in docs. A part in angle brackets stands
for something: `tokens/discarded/<cause>`. A recipe's own metrics may have any other name. Names that users bring from
elsewhere (`timing_s/step`) are aliases: written beside ours, with the same value.
"""

import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    unit: str
    """Empty: a plain number or a word."""
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "", "the step; from 0, and step t makes weight version t + 1"),
    Metric("reward/mean", "", "mean reward of all samples that came in the step, also of groups that were filtered"),
    Metric("reward/std", "", "their standard deviation"),
    Metric("reward/max", "", "the highest of them"),
    Metric("reward/min", "", "the lowest of them"),
    Metric(
        "reward/<name>/mean", "", "mean of one of several rewards, or of a named part of the only one; not weighted"
    ),
    Metric("reward/<name>/<part>/mean", "", "mean of a named part of one of several rewards"),
    Metric("reward/timed_out", "share", "answers that ran into their time limit, of those that were scored"),
    Metric("reward/crashed", "share", "answers whose own program crashed, of those that were scored"),
    Metric("reward/limit_s/mean", "s", "mean CPU time that answers were given, with `rewards.adaptive`"),
    Metric(
        "reward/scored_before", "", "answers of this process whose score was known: the same had been scored before"
    ),
    Metric("reward/remote_workers", "", "reward workers that are connected and stay; from the first that joined on"),
    Metric("reward/remote_places", "", "answers that reward workers can score at once"),
    Metric("reward/remote_scored", "", "results of reward workers since the last step"),
    Metric(
        "reward/remote_lost", "", "answers that were taken back from reward workers that were lost, and scored again"
    ),
    Metric("reward/quarantined_rows", "", "rows at which rewards kept failing, and which are not scored any more"),
    Metric("reward/judge/requests", "", "requests to judges since the run began"),
    Metric("reward/judge/retries", "", "those of them that came after a failed one for the same answer"),
    Metric("reward/judge/tokens_in", "tokens", "tokens that judges have read since the run began"),
    Metric("reward/judge/tokens_out", "tokens", "tokens that judges have written"),
    Metric("reward/judge/usd", "$", "what judges have cost, at the prices of the recipe"),
    Metric("reward/judge/latency_s/mean", "s", "mean time of a judge's reply since the step before"),
    Metric("validation/reward/mean", "", "mean reward of validation prompts, each the mean of its attempts"),
    Metric("validation/<set>/reward/mean", "", "the same, of one set"),
    Metric("validation/pass@<k>", "share", "validation prompts that k attempts solve at least once"),
    Metric("validation/<set>/pass@<k>", "share", "the same, of one set"),
    Metric("actor/pg_loss", "", "policy gradient loss, mean over the step's mini-batches"),
    Metric("actor/kl_loss", "nats", 'KL to the reference model, as it enters the loss, with `kl = "loss"`'),
    Metric("actor/entropy", "nats", "mean entropy of the policy over answer tokens"),
    Metric("actor/clip_frac_low", "share", "answer tokens whose ratio was clipped from below"),
    Metric("actor/clip_frac_high", "share", "answer tokens whose ratio was clipped from above"),
    Metric("actor/clip_frac_dual", "share", "answer tokens that the dual clip held back"),
    Metric("actor/correction_mean", "", "mean weight that a correction gave to answer tokens"),
    Metric("actor/correction_max", "", "the largest ratio of old to engine probability, before cap and mask"),
    Metric("actor/correction_capped", "share", "answer tokens whose weight the cap held back"),
    Metric("actor/correction_masked", "share", "answer tokens that a correction left without weight"),
    Metric("actor/ppo_kl", "nats", "how far the policy has moved from the log-probabilities that ratios are made with"),
    Metric("actor/reward_kl", "nats", 'KL a token that was taken off rewards, with `kl = "reward"`'),
    Metric("actor/grad_norm", "", "norm of the gradient before it was clipped, mean over the step's updates"),
    Metric(
        "actor/effective_sample_size",
        "share",
        "how many of an update's samples they are worth as samples of the current policy (docs/concepts/rounds.md)",
    ),
    Metric("actor/lr", "", "learning rate of the step's last update"),
    Metric(
        "actor/skipped_updates", "", "updates that were left out because the gradient was no number, or there was none"
    ),
    Metric(
        "actor/mismatch_kl",
        "nats",
        "KL between the log-probabilities that tokens were drawn with, in `async` mode by older weights too, and the "
        "trainer's",
    ),
    Metric(
        "actor/mismatch_kl/<engine>/<age>",
        "nats",
        "the same, of one kind of engine's tokens that are so many versions old; 0: the same weights",
    ),
    Metric("actor/mismatch_abs", "nats", "mean difference of the two, without its sign"),
    Metric("mismatch_kl", "nats", "alias of `actor/mismatch_kl`"),
    Metric("critic/vf_loss", "", "loss of the critic's values, mean over answer tokens"),
    Metric("critic/vf_clip_frac", "share", "answer tokens whose value the clip held back"),
    Metric("critic/value_mean", "", "mean value over answer tokens"),
    Metric("critic/return_mean", "", "mean of what the values should have been"),
    Metric(
        "critic/explained_variance",
        "share",
        "the part of the returns' variance that values at the step's start foretold; may be < 0",
    ),
    Metric("critic/grad_norm", "", "norm of the critic's gradient before it was clipped, mean over the step's updates"),
    Metric("critic/lr", "", "its learning rate"),
    Metric(
        "token/response_length/mean",
        "tokens",
        "mean length of the answers that the step took, those that `overlong` masks too",
    ),
    Metric("token/response_length/max", "tokens", "the longest of them"),
    Metric("token/response_length/min", "tokens", "the shortest of them"),
    Metric("token/response_length/p95", "tokens", "95% of them are not longer"),
    Metric("token/prompt_length/mean", "tokens", "mean length of their prompts"),
    Metric(
        "time/step_total", "s", "from the end of the step before to the end of this one; validation is no part of it"
    ),
    Metric("time/step_generate", "s", "from the opening of the round to its last group"),
    Metric("time/step_train", "s", "time in which the trainer had a micro-batch in hand"),
    Metric(
        "time/step_save", "s", "time in which the trainer was busy making the step safe: log, and copy for a checkpoint"
    ),
    Metric("time/step_publish", "s", "time in which the trainer was busy offering the new weights"),
    Metric("timing_s/step", "s", "alias of `time/step_total`"),
    Metric("timing_s/gen", "s", "alias of `time/step_generate`"),
    Metric("timing_s/update_actor", "s", "alias of `time/step_train`"),
    Metric("timing_s/update_weights", "s", "alias of `time/step_publish`"),
    Metric(
        "idle/trainer_share",
        "share",
        "the part of the step in which the trainer had nothing to train; publishing and validation do not count",
    ),
    Metric("idle/fleet_share", "share", "the part of the step after the last remote answer"),
    Metric(
        "seeding/t_seed_s", "s", "time in which the trainer's own devices generated for the round before they trained"
    ),
    Metric("perf/throughput", "tokens/s", "tokens trained a second and device (ranks and workers), prompts included"),
    Metric("perf/throughput_all_gpus", "tokens/s", "tokens trained a second, prompts included"),
    Metric("perf/micro_batches", "", "packs that went through the model"),
    Metric("token/trained", "tokens", "answer tokens that entered the loss"),
    Metric("token/through_model", "tokens", "tokens that went through the model, prompts included"),
    Metric("sample/trained", "", "samples that entered the loss"),
    Metric("sample/sequences", "", "training sequences of the step's samples; more than samples where episodes branch"),
    Metric(
        "sample/masked",
        "",
        "samples that others were compared with and that were not trained, such as those cut at the cap",
    ),
    Metric("sample/left_out", "", "samples left out of the step by `algorithm.max_mismatch` (training-step.md)"),
    Metric("group/trained", "", "groups of samples that entered the loss"),
    Metric("rounds/kind", "", "`short` or `long`"),
    Metric("rounds/long", "", "1 for a long round, otherwise 0: for trackers that take numbers only"),
    Metric("rounds/groups", "", "groups trained"),
    Metric("rounds/samples", "", "samples trained"),
    Metric("rounds/prompt_factor", "", "with `rounds.adaptive`, the factor for prompts at the end of the step"),
    Metric("rounds/sample_factor", "", "with `rounds.adaptive`, the factor for the samples of a prompt"),
    Metric("rounds/filtered_groups", "", "groups rejected because all their rewards were equal, and replaced"),
    Metric("fleet/workers", "", "remote workers, mean over the step"),
    Metric("fleet/migrations", "", "samples of the round that went on at another worker"),
    Metric("fleet/useful", "", "remote workers that are worth holding, as the scheduler advises"),
    Metric("fleet/draft_rounds", "", "steps of builtin engines that verified drafts, as heard since the last line"),
    Metric("fleet/drafted_tokens", "tokens", "tokens of these drafts (speculation.md)"),
    Metric("fleet/accepted_tokens", "tokens", "drafted tokens that were accepted: each saved its sample a step"),
    Metric("tokens/kept", "tokens", "answer tokens that the step took, those that `overlong` masks too"),
    Metric("tokens/discarded/<cause>", "tokens", "tokens thrown away since the step before; causes as in the ledger"),
    Metric("cost/usd_step", "$", "spent since the step before: the trainer's time and every worker's"),
    Metric("cost/usd_total", "$", "spent since the run began"),
    Metric("cost/usd_per_mtok", "$", "the step's dollars for a million answer tokens trained"),
    Metric(
        "bias/trained_mean_length",
        "tokens",
        "mean length of the answers that the step took, those that `overlong` masks too",
    ),
    Metric("bias/generated_mean_length", "tokens", "mean length of all answers of the round that ended by themselves"),
    Metric(
        "bias/expected_mean_length",
        "tokens",
        "mean length of answers, learned from all that were seen, those too that were stopped and would have gone on",
    ),
    Metric(
        "bias/inclusion_by_bin/<bin>", "share", "the run's answers of 2^(bin-1) to 2^bin - 1 tokens that were trained"
    ),
    Metric(
        "rollout/imposed_lengths",
        "",
        "1 if lengths of answers were drawn from a distribution, not written by the model",
    ),
    Metric(
        "staleness/mean", "versions", "mean age of the answer tokens trained: 0 if the step's own version wrote all"
    ),
    Metric("staleness/max", "versions", "the oldest of them"),
    Metric("staleness/tokens/<age>", "share", "answer tokens trained that are so many versions old"),
    Metric(
        "staleness/allowed",
        "versions",
        "how old the tokens of the next rounds may be, with a guard (docs/concepts/rounds.md)",
    ),
    Metric("staleness/alarm", "", "1 if the step raised the guard's alarm, otherwise 0"),
    Metric("staleness/mixed_samples", "share", "samples trained that more than one version wrote"),
    Metric(
        "run/breaks", "", "in the first step after a `--resume` with other settings: how many of them change training"
    ),
    Metric("run/changed", "", "in the same step: these settings, with their values before and after"),
    Metric("weights/version", "", "the version that the step made"),
)

TOPICS: Mapping[str, str] = {
    "step": "The step",
    "reward/mean": "What is learned",
    "actor/pg_loss": "How the policy changes",
    "critic/vf_loss": "What the critic learns",
    "token/response_length/mean": "How long answers are",
    "time/step_total": "Where the time goes",
    "perf/throughput": "How fast",
    "rounds/kind": "Rounds",
    "fleet/workers": "The fleet",
    "tokens/kept": "Tokens and dollars",
    "bias/trained_mean_length": "Whether long answers are trained as often as short ones",
    "staleness/mean": "How old what was trained on is",
    "run/breaks": "What was changed in a run that went on",
    "weights/version": "Weights",
}
"""The heading of each table on the page of metrics, by the first metric of the table."""

IMPOSED_LENGTHS = "lengths of answers are imposed"
"""The meaning of `rollout/imposed_lengths`, repeated by every output on a run."""

ALIASES: Mapping[str, str] = {
    "timing_s/step": "time/step_total",
    "timing_s/gen": "time/step_generate",
    "timing_s/update_actor": "time/step_train",
    "timing_s/update_weights": "time/step_publish",
    "mismatch_kl": "actor/mismatch_kl",
}
"""The name that users know a metric by, and ours."""

HEADLINES: Mapping[str, str] = {
    "reward": "reward/mean",
    "len": "token/response_length/mean",
    "time": "time/step_total",
    "critic": "critic/vf_loss",
    "kl": "actor/kl_loss",
    "entropy": "actor/entropy",
    "grad": "actor/grad_norm",
    "valid": "validation/reward/mean",
    "longest": "token/response_length/max",
    "tok/s": "perf/throughput_all_gpus",
    "workers": "fleet/workers",
    "moves": "fleet/migrations",
    "idle": "idle/trainer_share",
    "mismatch": "actor/mismatch_kl",
    "usd": "cost/usd_total",
    "round": "rounds/kind",
}
"""The metrics of a step's line by their labels there: the first ones at 80 columns, more on a wider terminal."""


def describe(name: str) -> Metric | None:
    """Return what a name means; None for one that is not ours."""
    return next((metric for metric, pattern in _patterns() if pattern.fullmatch(name)), None)


@cache
def _patterns() -> list[tuple[Metric, re.Pattern[str]]]:
    return [
        (metric, re.compile("".join(_part(part) for part in re.split(r"(<\w+>)", metric.name)))) for metric in METRICS
    ]


def _part(part: str) -> str:
    return "[^/]+" if part.startswith("<") else re.escape(part)
