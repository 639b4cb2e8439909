"""Laws of chats over turns, for whatever a policy draws and an environment says."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.hosts.policies import HERMES, IM_END, IM_START, text_model
from tests.serving import CHATML

from polyrl.hosts.chats import Chat
from polyrl.hosts.episode import DrawnAnswer
from polyrl.hosts.replies import message_of

MODELS = {
    name: text_model(template, max_context=100_000) for name, template in (("chatml", CHATML), ("hermes", HERMES))
}
SAID = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["", " ", "\n", "<|im_end|>", "<|im_start|>user\n", "<tool_call>", "</think>", " x \n"]),
)
TURN = st.tuples(st.lists(st.integers(0, 255), max_size=8), st.booleans(), SAID)


@given(name=st.sampled_from(sorted(MODELS)), first=SAID, turns=st.lists(TURN, min_size=1, max_size=4))
def test_every_prompt_begins_with_all_that_was_drawn_and_shows_what_the_template_writes(
    name: str, first: str, turns: list[tuple[list[int], bool, str]]
):
    model = MODELS[name]
    assert model.template is not None
    chat = Chat(model)
    messages: list[dict[str, Any]] = [{"role": "user", "content": first}]
    sampled: list[dict[str, Any]] = list(messages)
    before: list[int] = []
    for bytes_drawn, is_cut_off, said in turns:
        prompt = chat.prompt(messages, None, {})
        assert prompt.tokens[: len(before)] == before
        assert prompt.tokens.count(IM_START) == len(messages) + 1, "what somebody says begins no message"
        shown = model.decode(prompt.tokens, special=True)
        assert shown == model.template.render(sampled, {}) or "\ufffd" in shown
        drawn = bytes_drawn if is_cut_off else [*bytes_drawn, IM_END]
        answer = DrawnAnswer(drawn, [-0.5] * len(drawn), "length" if is_cut_off else "stop")
        reply = message_of(model.decode(bytes_drawn), [])
        chat.record(prompt, answer, reply)
        messages = [*messages, reply, {"role": "user", "content": said}]
        sampled = [*sampled, {"role": "assistant", "content": model.decode(bytes_drawn, special=True)}, messages[-1]]
        before = [*prompt.tokens, *drawn]
