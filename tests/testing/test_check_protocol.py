"""The check finds what is broken in protocols that it knows nothing of, names it, and leaves sound ones alone."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from cases import long

from sectorch.choreography import PROTOCOLS, Message, Net, Roles, leaf, protocol
from sectorch.errors import ArgumentError, MisplacedValueError, TopologyError, UndeclaredMessageError
from sectorch.mpc.star.multiply import multiply
from sectorch.mpc.star.relu import relu
from sectorch.mpc.star.shares import Shares, each, share
from sectorch.mpc.star.truncate import truncate
from sectorch.ring import products
from sectorch.testing import Given, ProtocolFault, check_protocol, joint_knowledge, mutate_protocol
from sectorch.testing.joint_knowledge import Views, broken_sum, numbers
from sectorch.testing.outcomes import Exhaustive, Outcomes, columns_differ, distinguishable, in_elements
from sectorch.testing.protocol_runs import Case

BEFORE = dict(PROTOCOLS)
import own_roles  # noqa: E402
import shares  # noqa: E402

ANY = Given(low=-(1 << 63), high=(1 << 63) - 1)
GALLERY = [*shares.GALLERY, *own_roles.GALLERY]
OWN = {name: spec for name, spec in PROTOCOLS.items() if name not in BEFORE}


@pytest.fixture(autouse=True)
def registry():
    """What is declared here is not for tests that read the registry."""
    before = dict(PROTOCOLS)
    PROTOCOLS.update(OWN)
    yield
    PROTOCOLS.clear()
    PROTOCOLS.update(before)


for _name in OWN:
    del PROTOCOLS[_name]


def check_twin(exhibit, **options):
    reference = exhibit.right or exhibit.reference
    return check_protocol(exhibit.repaired, exhibit.given, reference, **exhibit.options, **options)


@pytest.mark.parametrize("short", [{"elements": 1024, "pairs": 2}, *long({})])
@pytest.mark.parametrize("exhibit", GALLERY, ids=lambda e: e.name)
def test_a_broken_protocol_is_refused_and_its_leak_named(exhibit, short):
    options = short | exhibit.options | exhibit.allowed
    with pytest.raises(ProtocolFault) as caught:
        check_protocol(exhibit.broken, exhibit.given, exhibit.reference, **options)
    findings = [str(f) for f in caught.value.report.findings]
    assert any(all(word in text for word in exhibit.named) for text in findings), findings
    assert "lost" not in str(caught.value), "a broken protocol still ends well where messages are lost"


FEW = [e for e in GALLERY if e.name == "an average that shows one party"]


@pytest.mark.parametrize("exhibit", FEW, ids=lambda e: e.name)
def test_a_repaired_twin_passes(exhibit):
    report = check_twin(exhibit)
    assert report.findings == [] and report.false_alarms < 1e-6
    assert 0 < report.bias_found < 0.1
    assert "nothing" in report.table() and report.as_dict()["tests"] == report.tests


@pytest.mark.sectorch_long
@pytest.mark.parametrize("first", range(0, 20, 5))
@pytest.mark.parametrize("exhibit", GALLERY, ids=lambda e: e.name)
def test_no_twin_is_refused_in_many_seeds(exhibit, first):
    for seed in range(first, first + 5):
        assert check_twin(exhibit, seed=seed).findings == []


# What is said of a protocol beside its leaks.


def test_a_wrong_result_is_named_by_its_inputs():
    with pytest.raises(ProtocolFault, match=r"result 0 for input -?\d+ is -?\d+, and the reference's -?\d+"):
        check_protocol(lambda net, x: x + 1, [ANY], lambda x: torch.where(x == 3, x, x + 1))


def test_costs_are_measured():
    options = dict(elements=512, seconds=1e6)
    at_Q, same = [Given("Q")], lambda x: x
    measured = check_protocol(share, at_Q, same, cost={"rounds": 1, "online": 8}, **options)
    assert "rounds 1" in measured.looked["cost"]
    with pytest.raises(ProtocolFault, match="cost: online bytes an element are stated as 7, and are 8"):
        check_protocol(share, at_Q, same, cost={"online": 7}, **options)
    with pytest.raises(ArgumentError, match="no 'bytes'"):
        check_protocol(share, at_Q, same, cost={"bytes": 7}, **options)


@pytest.mark.sectorch_long
def test_protocols_that_are_not_elementwise():
    product = lambda net, x, y: multiply(net, leaf(products.matmul), x, y)
    sizes = [Given(shape=(1, 2)), Given(shape=(2, 1))]
    leaks = mutate_protocol(
        product, sizes, torch.matmul, elementwise=False, runs=384, kinds=("mask twice", "mask told"), most=3
    )
    assert leaks.survivors == [] and "view" in {p.by for p in leaks.planted}


def test_a_step_of_two_values_is_taken_of_values_of_their_type_alone():
    """A matrix product of words of 64 bits, beside a draw of the same shape of 32."""

    def beside(net: Net, x: Shares, y: Shares) -> Shares:
        drawn = net.common(net.Q, net.A, (2, 2), "of 32", dtype=torch.int32).to(torch.int64)
        made = multiply(net, leaf(products.matmul), x, y)
        return Shares(made.A + (drawn - drawn.clone()), made.S)

    options = {"elementwise": False, "runs": 60, "pairs": 1}
    case = Case.of(beside, [Given(shape=(2, 2))] * 2, torch.matmul, options)
    outcomes = Outcomes(case.trace(), case)
    assert list(Views(outcomes.protocol, outcomes).check(["A"])) == []


def test_elements_that_share_a_secret_are_no_experiments():
    """Under one mask, all their products are even, or none."""

    def times_drawn(net: Net, x: Shares) -> Shares:
        k = Shares(net.common(net.Q, net.A, (1,), "k_A"), net.common(net.Q, net.S, (1,), "k_S"))
        return multiply(net, torch.mul, x, k)

    scalar = Given(low=ANY.low, high=ANY.high, shape=(1,))
    for f, given in ((times_drawn, [ANY]), (lambda net, x, y: multiply(net, torch.mul, x, y), [ANY, scalar])):
        with pytest.raises(ArgumentError, match=r"share a value of 1 in a step of .*elementwise=False"):
            check_protocol(f, given, torch.mul)


def test_values_that_follow_from_one_opened_word_are_one_experiment():
    """100 functions of a word are no 100 experiments; what differs in every run, or in enough of them, is found."""
    random = np.random.default_rng(0)
    draw = lambda *shape: random.integers(-(1 << 63), 1 << 63, shape, np.int64)
    words, others = draw(1, 512), draw(1, 512)
    one, other = (np.repeat(v, 100, 0) for v in (words, others))
    assert distinguishable(one.reshape(-1), other.reshape(-1)), "all taken for independent"
    assert not columns_differ(one, other) and not columns_differ(words, others)
    leaks = [np.zeros_like(one), other & ~1, np.where(np.arange(512) < 300, other & ~255, other), other >> 3]
    assert all(columns_differ(one, leak) for leak in leaks)
    few = one[:, :40]
    assert columns_differ(few, few), "too few runs to judge by"


def test_a_sound_protocol_whose_messages_repeat_a_value_passes(monkeypatch):
    """Rows of a message that repeat a masked value: the elements are experiments, and the rows are not."""

    @protocol("repeats", "a test", [Message("rows", "A", "S", "mask of k_QA")])
    def repeats(net: Net, x: Shares) -> Shares:
        mask = net.common(net.Q, net.A, x.shape, "mask")
        (x.A + mask.at(net.A)).expand(40, -1).send(net.A, net.S, "rows")
        return x

    options = {"pairs": 1, "uniform": False, "exhaustive": 0}
    for more in ({"elements": 1024}, {"elements": 2, "elementwise": False}):
        case = Case.of(repeats, [Given()], lambda x: x, {**options, **more})
        outcomes = Outcomes(case.trace(), case)
        found = lambda outcomes=outcomes: list(Views(outcomes.protocol, outcomes).check({"S"}))
        assert not found()
        with monkeypatch.context() as patch:
            patch.setattr(joint_knowledge, "columns_differ", lambda *_: True)
            assert found(), "as if all values were independent"


def test_a_draw_of_which_bits_change_nothing():
    """Half a mask, on something that nobody sees: no message shows it."""

    def half_drawn(net: Net, x: Shares) -> Shares:
        short = net.common(net.Q, net.A, x.shape, "short") & 0xFFFF
        return Shares(x.A + (short - short.clone()) + 0 * x.A, x.S)

    with pytest.raises(ProtocolFault, match="of program/short, which A and Q draw, the highest byte changes nothing"):
        check_protocol(half_drawn, [ANY], lambda x: x, elements=256, seconds=1e6)


def test_an_option_that_there_is_not():
    for check in (check_protocol, mutate_protocol):
        with pytest.raises(ArgumentError, match="no option 'elemnts'; there are roles, dealer"):
            check(share, [Given("Q")], lambda x: x, elemnts=3)


def test_the_same_seed_finds_the_same():
    found = []
    for _ in range(2):
        with pytest.raises(ProtocolFault) as caught:
            check_protocol(shares.low_bit_kept, [Given()], lambda x: x, elements=512, seed=5)
        found.append(str(caught.value))
    assert found[0] == found[1]


# What hardly any draw shows.


def test_an_error_under_one_mask_is_found_on_small_domains_alone():
    (exhibit,) = (e for e in GALLERY if e.name == "an error under one mask")
    check = partial(check_protocol, exhibit.broken, exhibit.given, exhibit.reference, elements=512)
    for seed in range(3):
        assert check(exhaustive=0, seed=seed).findings == []
    with pytest.raises(ProtocolFault) as caught:
        check()
    (found,) = caught.value.report.findings
    assert found.text.endswith("and all other draws are 0")


def on_small_domains(f, given, reference, bits: int = 3) -> list[tuple[str, str]]:
    case = Case.of(f, given, reference, {"elements": 512})
    outcomes = Outcomes(case.trace(), case)
    assert in_elements(outcomes.protocol)
    return list(Exhaustive(outcomes, bits, 0).check())


def test_a_domain_that_is_a_little_too_wide_is_found():
    """Where half a unit takes a value to 2^62, one of 2^43 masks gives another result: as the docstring says."""
    cut, most = partial(truncate, shift=20), (1 << 62) - (1 << 19) - 1
    rounded = lambda x: (x + (1 << 19)) >> 20
    assert on_small_domains(cut, [Given(low=-most, high=most)], rounded) == []
    ((check, text),) = on_small_domains(cut, [Given(low=-most, high=most + 8)], rounded)
    assert check == "exhaustive" and text.startswith("result 0 for input 46116860184268")


def test_domains_of_too_many_cases_and_inputs_that_are_not_elements():
    with pytest.raises(ArgumentError, match="pass fewer bits"):
        check_protocol(share, [Given("Q")], lambda x: x, exhaustive=8, elements=64)
    with pytest.raises(ArgumentError, match="1 to 8, or 0 for none; got 9"):
        check_protocol(share, [Given("Q")], lambda x: x, exhaustive=9, elements=64)
    report = check_protocol(share, [Given("Q", shape=(2, 8))], lambda x: x, elements=16, seconds=1e6)
    assert "exhaustive" not in report.looked


# What is refused, and how.


def test_a_check_without_a_reference():
    with pytest.raises(ArgumentError, match="needs a reference"):
        check_protocol(lambda net, x: x, [ANY], None)  # pyright: ignore[reportArgumentType]


@leaf
def _thrown(x: torch.Tensor) -> torch.Tensor:
    return x + torch.randint_like(x, 0, 2)


def test_a_step_that_is_random_without_fresh():
    with pytest.raises(ArgumentError, match=r"net\.fresh"):
        check_protocol(lambda net, x: each(_thrown, x), [ANY], lambda x: x, elements=256)


def test_shapes_too_large_for_the_time():
    with pytest.raises(ArgumentError, match="pass fewer elements="):
        check_protocol(lambda net, x: relu(net, x), [Given()], lambda x: x.clamp(min=0), seconds=1e-6, elements=256)


@protocol("careless_kit", "this test", [Message("x", "A", "S", "nothing")])
def undeclared(net: Net, x: Shares) -> Shares:
    return Shares(x.A, x.S + 0 * x.A.send(net.A, net.S, "y"))


def test_what_the_choreography_refuses_is_its_own_error():
    with pytest.raises(UndeclaredMessageError):
        check_protocol(undeclared, [ANY], lambda x: x)
    with pytest.raises(MisplacedValueError):
        check_protocol(lambda net, x: Shares(x.A + x.S, x.S), [ANY], lambda x: x)
    with pytest.raises(TopologyError):
        check_protocol(lambda net, x: net.common(net.Q, net.Q, x.shape, "r"), [ANY], lambda x: x)


@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        ([Given("B")], {}, "the party 'B'"),
        ([Given()], {"roles": Roles("P R", edges="P-R")}, "is shared by A and S"),
        ([ANY, ANY], {}, "takes|positional|argument"),
    ],
)
def test_inputs_that_do_not_fit(given, options, said):
    with pytest.raises((ArgumentError, TypeError), match=said):
        check_protocol(lambda net, x: x, given, lambda x: x, **options)


def test_a_range_that_is_none():
    with pytest.raises(ArgumentError, match="from low to high"):
        Given(low=1, high=0)


def test_results_that_do_not_fit_the_reference():
    with pytest.raises(ArgumentError, match="1 results, and the reference 2"):
        check_protocol(lambda net, x: x, [ANY], lambda x: (x, x), elements=64)
    with pytest.raises(ArgumentError, match="gives what it computes"):
        check_protocol(lambda net, x: None, [ANY], lambda x: x, elements=64)


# Its parts.


def test_a_sum_that_is_zero_for_one_secret_only_is_found():
    random = np.random.default_rng(1)
    a, b, c = (random.integers(0, 256, (1, 512), np.uint8) for _ in range(3))
    unrelated, related = np.concatenate([a, b, c]), np.concatenate([a, b, a ^ b])
    length = 8 * 512
    assert sorted(broken_sum(numbers(related), numbers(unrelated), length) or []) == [0, 1, 2]
    assert broken_sum(numbers(unrelated), numbers(related), length) is None, "asked the other way round"
    assert broken_sum(numbers(related), numbers(related), length) is None
    other = np.concatenate([a, b, a ^ b ^ np.uint8(255)])
    assert sorted(broken_sum(numbers(related), numbers(other), length) or []) == [0, 1, 2], "another constant"
    nearly = related.copy()
    nearly[2, :4] ^= 255
    assert broken_sum(numbers(related), numbers(nearly), length) is None, "32 of 4096 may be chance"
    said = sorted(broken_sum(numbers(related), numbers(unrelated), length, lambda taken: 0) or [])
    assert said == [0, 1, 2], "another run has it too"
    assert broken_sum(numbers(related), numbers(unrelated), length, lambda taken: 13) is None, "another run has it not"
