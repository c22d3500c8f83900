"""An engine core whose tokenizers die and are replaced: whose work goes on, who is told what.

CASE 95, as far as the engine core goes.
"""

from driver import Engine
from fake_peers import FakeChild
from specs import small_spec

from zlm.config import Config, ModelOptions, ServerOptions, resolve
from zlm.engine.tokenizers import Tokenizers
from zlm.messages import EngineReady, Grammar, Launch, PeerLost, PeerUp, StepOutput, first_id

READY = EngineReady([9], 64)
NEWS = StepOutput(b"", b"", b"")


def make(*incarnations: tuple[str, int, int]) -> tuple[Tokenizers, FakeChild]:
    server = ServerOptions(tokenizer_pool_size=2)
    config = Config(model=ModelOptions(model="x"), server=server)
    spec = small_spec(vocab_size=29, max_position=64)
    resolved = resolve(config, spec, model_path="x", tokenizer_path="x", device="cpu")
    child = FakeChild()
    return Tokenizers(child, Launch(resolved, list(incarnations))), child  # type: ignore[arg-type]


def test_news_go_to_the_incarnation_that_is_there() -> None:
    tokenizers, child = make(("tokenizer", 1, 4))
    assert child.living() == [("tokenizer", 0, 0), ("tokenizer", 1, 4)]
    tokenizers.announce(READY)
    assert tokenizers.take(PeerLost("tokenizer", 1, 4))
    tokenizers.send(1, NEWS)  # to nobody
    assert tokenizers.take(PeerUp("tokenizer", 1, 5))
    tokenizers.send(1, NEWS)
    assert child.living() == [("tokenizer", 0, 0), ("tokenizer", 1, 5)]
    assert [outbox.sent for outbox in child.opened] == [[READY], [READY], [READY, NEWS]]


def test_one_that_comes_before_the_engine_is_ready_is_told_when_it_is() -> None:
    tokenizers, child = make()
    tokenizers.take(PeerUp("tokenizer", 0, 1))
    assert [outbox.sent for outbox in child.opened] == [[], [], []]
    tokenizers.announce(READY)
    assert [outbox.sent for outbox in child.opened] == [[], [READY], [READY]]


def test_only_what_the_living_have_made_is_taken() -> None:
    tokenizers, _ = make()
    assert tokenizers.knows(first_id(0, 0) + 5)
    tokenizers.take(PeerLost("tokenizer", 0, 0))
    assert not tokenizers.knows(first_id(0, 0) + 5)
    tokenizers.take(PeerUp("tokenizer", 0, 1))
    assert not tokenizers.knows(first_id(0, 0) + 5) and tokenizers.knows(first_id(0, 1) + 5)
    assert tokenizers.knows(first_id(1, 0) + 5)


def test_old_news_and_those_of_others_are_none() -> None:
    tokenizers, child = make(("tokenizer", 0, 2))
    before = child.living()
    assert not tokenizers.take(PeerLost("tokenizer", 0, 1))
    assert not tokenizers.take(PeerLost("frontend", 0, 9))
    assert child.living() == before


def test_the_work_of_a_dead_tokenizer_is_given_up_and_no_other() -> None:
    engine = Engine(max_num_seqs=2)
    grammar = Grammar("regex", "[a-y]+")
    lost = [engine.submit([4, 5, 6], 9, n=2, owner=1), engine.submit([4], 9, owner=1)]
    kept = engine.submit([7, 8], 9)
    engine.compiles_later = True
    compiling = engine.submit([4], 9, owner=1, grammar=grammar)
    engine.send()
    engine.core.abandon(1, engine.now)
    while engine.core.num_compiling:
        engine.core.take_compiled(engine.now)
    assert set(engine.scheduler.unfinished()) == {kept}
    for seq_id in (*lost, lost[0] + 1, compiling):
        del engine.told[seq_id]  # there is nobody to tell
    engine.run()
