"""When a choice was given room and had its first token is told with its end, however it ends."""

from collections.abc import Callable

from zlm.messages import RUNNING


def test_a_choice_tells_its_times_at_its_end(make_engine: Callable) -> None:
    engine = make_engine()
    (submit,) = engine.generate("a", n=2, stream=True, stop=["!"])
    first, second = submit.seq_id, submit.seq_id + 1
    tokens = engine.core.vocabulary.encode("xyz!")
    engine.step((first, tokens[0], RUNNING), times=[(0, 1.5, 2.25)])
    engine.step((second, tokens[0], RUNNING), times=[(0, 3.0, 4.0)])
    assert all(delta.times is None for delta in engine.deltas())
    assert engine.run(first, tokens[1:3])[-1].times == (1.5, 2.25)
    engine.step((second, tokens[-1], RUNNING))  # ended here, by the stop string
    (end,) = [d for d in engine.deltas() if d.finish_reason == "stop"]
    assert end.times == (3.0, 4.0)
    assert [d.times for d in engine.deltas() if d.times] == [(1.5, 2.25), (3.0, 4.0)]
