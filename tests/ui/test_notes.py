"""What processes note of their start for the dashboard: the same as their tables in the log."""

import json

from zlm.process import notes
from zlm.supervisor.startup_table import StartupTable
from zlm.worker.gpu_costs import Card, Costs
from zlm.worker.gpu_memory import GpuPlan
from zlm.worker.memory_plan import GIB, GroupFacts, MemoryPlan

BLOCKS = MemoryPlan((GroupFacts(0, 1024), GroupFacts(512, 256)), (99, 39), 16, 10**6)


def test_a_note_takes_the_place_of_the_former_one(tmp_path):
    assert notes.read(tmp_path, "memory") is None and notes.stamp(tmp_path, "memory") == 0
    notes.write(tmp_path, "memory", {"a": [1, "b"]})
    first = notes.stamp(tmp_path, "memory")
    assert notes.read(tmp_path, "memory") == {"a": [1, "b"]} and first
    notes.write(tmp_path, "memory", {"a": 2})
    assert notes.read(tmp_path, "memory") == {"a": 2} and notes.stamp(tmp_path, "memory") >= first
    assert [path.name for path in tmp_path.iterdir()] == ["note-memory"]


def test_the_plan_of_a_cpu():
    facts = BLOCKS.facts()
    taken = 100 * 1024 + 40 * 256
    assert facts["parts"] == [("KV cache", taken), ("left free", 10**6 - taken)]
    assert facts["groups"] == [(0, 99, 99 * 16, 100 * 1024), (512, 39, 39 * 16, 40 * 256)]
    assert json.loads(json.dumps(facts))["title"]


def test_the_plan_of_a_gpu_accounts_for_the_whole_card():
    card = Card("a card", 8 * GIB, 7 * GIB)
    costs = Costs(weights=GIB, tables=2**20, activations=2**20, graphs=2**20, context=2**20,
                  reserve=2**20)  # fmt: skip
    facts = GpuPlan(card, 7 * GIB, costs, BLOCKS).facts()
    assert facts["title"] == "a card"
    assert sum(size for _, size in facts["parts"]) == card.total_bytes
    others = card.total_bytes - card.available_bytes
    assert dict(facts["parts"])["other processes"] == others > 0
    assert facts["groups"] == BLOCKS.facts()["groups"]


def test_the_start_counts_from_its_beginning():
    table = StartupTable(100.0)
    table.phase("worker 0", "loading", 101.0, 5)
    table.ready("worker 0", 103.5, 7)
    assert table.facts(104.0) == {
        "seconds": 4.0,
        "phases": [("worker 0", "starting", 0.0, 1.0, 5), ("worker 0", "loading", 1.0, 3.5, 7)],
    }
