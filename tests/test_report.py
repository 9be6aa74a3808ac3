"""What users read: the table, JSON, unmatched patterns, several graphs in one row."""

import json

import expecttest
import pytest
import torch
from torch import nn

from graphs import recording_backend
from models import TILES, dit, skip_config, tokens
from skip_attn_compile import Rule, backend
from skip_attn_compile.report import Report, SiteReport, nearest
from skip_attn_compile.summary import IN_NO_GRAPH, NOT_RUN


def report_of(model=None, *inputs, **fields) -> Report:
    be, _ = recording_backend(skip_config(**fields))
    torch.compile(model or dit(), backend=be)(*(inputs or (tokens(),)))
    return be.report()


def example() -> Report:
    fields = {
        "ignore": ("blocks.0.*",),
        "rules": (Rule("blocks.2.attn1", threshold=0), Rule("blocks.3.attn1", dense=True)),
        "min_kv_len": 100,
    }
    context = tokens(length=77)
    return report_of(dit(4, cross=True), tokens(), context, torch.ones(1, 1, 1, 77) > 0, **fields)


class TestText(expecttest.TestCase):
    """`EXPECTTEST_ACCEPT=1 pytest tests/test_report.py` writes the expected texts anew."""

    def setUp(self) -> None:
        torch._dynamo.reset()

    def test_table(self) -> None:
        self.assertExpectedInline(
            str(example()),
            """\
site            decision   keys  lambda  tiles  skipped  reasons
blocks.0.attn1  kept       512           0               ignored by pattern 'blocks.0.*'
blocks.0.attn2  kept       77            0               short: 77 keys < min_kv_len 100; ignored by pattern 'blocks.0.*'
blocks.1.attn1  sparse     512   0.3     64     51.6%
blocks.1.attn2  kept       77            0               short: 77 keys < min_kv_len 100
blocks.2.attn1  dense now  512   0       64     0.0%     threshold is 0
blocks.2.attn2  kept       77            0               short: 77 keys < min_kv_len 100
blocks.3.attn1  kept       512           0               rule 'blocks.3.attn1' says dense
blocks.3.attn2  kept       77            0               short: 77 keys < min_kv_len 100
8 sites (1 sparse, 1 dense now, 6 kept) in 1 graph; 33 of 128 tiles skipped (25.8%)
run by reference: tiles of 64 rows and 128 keys, ascending or own_first""",
        )

    def test_one_site(self) -> None:
        self.assertExpectedInline(
            str(report_of(dit(1))),
            """\
site            decision  keys  lambda  tiles  skipped  reasons
blocks.0.attn1  sparse    512   0.3     64     25.0%
1 site (1 sparse) in 1 graph; 16 of 64 tiles skipped (25.0%)
run by reference: tiles of 64 rows and 128 keys, ascending or own_first""",
        )

    def test_unmatched_patterns(self) -> None:
        report = report_of(
            include=("blocks.*", "block.0.attn1"), ignore=("blocks.0.atn1", "text_encoder.*"), rules=[Rule("blocks.7.*", dense=True)]
        )
        self.assertExpectedInline(
            str(report),
            """\
site            decision  keys  lambda  tiles  skipped  reasons
blocks.0.attn1  sparse    512   0.3     64     25.0%
blocks.1.attn1  sparse    512   0.3     64     21.9%
2 sites (2 sparse) in 1 graph; 30 of 128 tiles skipped (23.4%)
run by reference: tiles of 64 rows and 128 keys, ascending or own_first
include pattern 'block.0.attn1' matched no attention layer; nearest: blocks.0.attn1, blocks.1.attn1
ignore pattern 'blocks.0.atn1' matched no attention layer; nearest: blocks.0.attn1, blocks.1.attn1
ignore pattern 'text_encoder.*' matched no attention layer
rules pattern 'blocks.7.*' matched no attention layer; nearest: blocks.1.attn1, blocks.0.attn1""",
        )

    def test_before_the_first_call(self) -> None:
        self.assertExpectedInline(
            str(backend(skip_config()).report()),
            """\
site  decision  keys  lambda  tiles  skipped  reasons
0 sites in 0 graphs; 0 of 0 tiles skipped
no scaled_dot_product_attention call was seen in 0 compiled graphs; nothing has run compiled yet, or Dynamo runs it eager past its recompile limit: then call torch.compiler.reset()""",  # noqa: E501
        )

    def test_without_attention(self) -> None:
        self.assertExpectedInline(
            str(report_of(torch.nn.Linear(32, 32))),
            """\
site  decision  keys  lambda  tiles  skipped  reasons
0 sites in 1 graph; 0 of 0 tiles skipped
no scaled_dot_product_attention call was seen in 1 compiled graph: """
            + IN_NO_GRAPH,
        )

    def test_unattached_blocks(self) -> None:
        model, (be, _) = dit(2), recording_backend(skip_config(ignore=("blocks.0.*",)))
        for block in model.blocks:
            block.compile(backend=be)
        model(tokens())
        self.assertExpectedInline(
            str(be.report()),
            """\
site                              decision   keys  lambda  tiles  skipped  reasons
Block:attn1                       dense now  512           0               call attach(model) on the backend so that its layers have names
unknown layer (attach the model)  dense now                128    0.0%     call attach(model) on the backend so that its layers have names
2 sites (2 dense now) in 1 graph; 0 of 128 tiles skipped (0.0%)
run by reference: tiles of 64 rows and 128 keys, ascending or own_first""",
        )


def test_json_round_trip() -> None:
    report = example()
    back = json.loads(report.to_json())
    assert back == json.loads(json.dumps(report.to_dict()))
    assert (back["visited"], back["skipped"], back["sparsity"], back["graphs"]) == (report.visited, report.skipped, report.sparsity, 1)
    assert report.sparsity == report.skipped / report.visited
    for site, row in zip(report.sites, back["sites"], strict=True):
        assert (row["name"], row["decision"], tuple(row["reasons"]), row["threshold"]) == (
            site.name,
            site.decision,
            site.reasons,
            site.threshold,
        )
        assert (row["visited"], row["skipped"], row["sparsity"]) == (site.visited, site.skipped, site.sparsity)


def test_json_has_no_nan_and_nothing_but_plain_values() -> None:
    json.loads(example().to_json(), parse_constant=lambda constant: pytest.fail(constant))


def test_sparsity_before_any_tile() -> None:
    assert SiteReport("a", "kept").sparsity is None
    assert Report([SiteReport("a", "kept")]).sparsity is None


def test_a_missing_site_names_the_nearest() -> None:
    report = report_of()
    assert report.site("blocks.1.attn1").visited == TILES
    with pytest.raises(KeyError, match="no attention site 'blocks.1.atn'; nearest: blocks.1.attn1, blocks.0.attn1"):
        report.site("blocks.1.atn")
    with pytest.raises(KeyError, match="nearest: none"):
        Report([]).site("x")


def test_unmatched_patterns_say_where_they_stand() -> None:
    report = report_of(ignore=("blocks.0.atn1", "blocks.1.*"), rules=[Rule("block.*", dense=True)])
    assert [(u.field, u.pattern) for u in report.unmatched] == [("ignore", "blocks.0.atn1"), ("rules", "block.*")]
    assert report.unmatched[0].nearest[0] == "blocks.0.attn1"


def test_a_pattern_that_matches_a_kept_layer_has_matched() -> None:
    assert report_of(ignore=("blocks.0.*", "*.attn1")).unmatched == []


def test_component_patterns_match_by_either_name() -> None:
    model = dit()
    be, _ = recording_backend(skip_config(ignore=("transformer.blocks.0.*", "blocks.1.*", "transformer_2.*")))
    be.attach(model, "transformer")
    torch.compile(model, backend=be)(tokens())
    assert [u.pattern for u in be.report().unmatched] == ["transformer_2.*"]


def test_several_graphs_are_one_row() -> None:
    model = dit(1)
    be, recorder = recording_backend(skip_config(min_kv_len=400))
    compiled = torch.compile(model, backend=be, dynamic=False)
    for length in (256, 512, 640, 512):
        compiled(tokens(length=length))
    report = be.report()
    assert (len(recorder.graphs), report.graphs, len(report.sites)) == (3, 3, 1)
    (site,) = report.sites
    assert (site.decision, site.kv_lens) == ("sparse", ("256", "512", "640"))
    assert site.visited == 2 * TILES + 2 * 10 * 5


def test_merging_takes_the_liveliest_decision() -> None:
    for first, second in (("kept", "sparse"), ("sparse", "kept"), ("dense now", "kept"), ("kept", "dense now"), ("dense now", "sparse")):
        a = SiteReport("a", first, ("x",), 0.1 if first == "sparse" else None, kv_lens=("1",), visited=1, skipped=1)
        a.merge(SiteReport("a", second, ("x", "y"), 0.1 if second == "sparse" else None, kv_lens=("2",), visited=2))
        assert a.decision == min(first, second, key=("sparse", "dense now", "kept").index)
        assert (a.reasons, a.kv_lens, a.visited, a.skipped) == (("x", "y"), ("1", "2"), 3, 1)
        assert a.threshold == (0.1 if a.decision == "sparse" else None)


def test_an_old_report_does_not_change() -> None:
    model, (be, _) = dit(1), recording_backend(skip_config())
    compiled = torch.compile(model, backend=be)
    compiled(tokens())
    old = be.report()
    compiled(tokens())
    assert (old.visited, be.report().visited) == (TILES, 2 * TILES)


def test_nearest_has_no_doubles_and_no_strangers() -> None:
    assert nearest("blocks.0.atn1", ["blocks.0.attn1", "blocks.0.attn1", "xyz"]) == ("blocks.0.attn1",)


def test_recompile_limit_is_said() -> None:
    be, recorder = recording_backend(skip_config())
    compiled = torch.compile(dit(), backend=be, dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    for variant in range(limit - 1):
        compiled(tokens(length=256 + variant))
    assert be.report().notes == []
    compiled(tokens(length=512))
    (note,) = be.report().notes
    assert note.startswith(f"forward has the {limit} compiled variants that Dynamo allows: any further one runs eager")
    before = be.report().visited
    compiled(tokens(length=640))  # what the note says: eager, nothing counted
    assert len(recorder.graphs) == limit
    assert be.report().visited == before
    assert note in str(be.report())


def test_the_limit_is_said_of_functions_without_attention_too() -> None:
    """As the hooks of offloading are, behind which Dynamo then runs attention eagerly."""
    model = dit()
    be = backend(skip_config(), inner="eager", model=model)

    @torch.compile(backend=be, dynamic=False)
    def hook(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for variant in range(torch._dynamo.config.recompile_limit):
        hook(torch.ones(2 + variant))
    limit = be.report().notes[-1]
    assert limit.startswith("hook has the 8 compiled variants that Dynamo allows")


def test_layers_that_have_not_run_say_so() -> None:
    model = dit(3)
    be = backend(skip_config(), inner="eager", model=model)
    for block in model.blocks:
        block.compile(backend=be)
    model.blocks[1](model.blocks[0](tokens()))
    assert [site.reasons for site in be.report().sites] == [(), (), (NOT_RUN,)]
    model(tokens())
    assert [site.reasons for site in be.report().sites] == [(), (), ()]


def test_attention_that_no_graph_holds_is_named() -> None:
    model = dit(3, cross=True)
    model.blocks[1].attn1.forward = torch.compiler.disable(model.blocks[1].attn1.forward)
    model.blocks[2].attn1 = LinearAttention()
    be = backend(skip_config(), inner="eager", model=model)
    assert "has served" not in str(be.report())  # nothing has run
    torch.compile(model, backend=be)(tokens(), tokens())
    (note,) = be.report().notes
    assert note.startswith("no compiled graph has served 1 of 2 blocks.*.attn1 (Attention), 1 of 1 blocks.*.attn1 (LinearAttention): ")


def test_another_model_that_has_not_run_yet_is_not_named() -> None:
    model, other = dit(), Sequence()
    be = backend(skip_config(), inner="eager", model=model)
    be.attach(other, "other")
    torch.compile(model, backend=be)(tokens())
    assert be.report().notes == []


class LinearAttention(nn.Module):
    """No softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (x.mT @ x) / x.shape[1]


class Sequence(nn.Sequential):
    """A model of another class than Dit."""

    def __init__(self) -> None:
        super().__init__(LinearAttention())
