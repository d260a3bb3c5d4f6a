"""Programs may skip experts without tokens, but other Python code must not depend on which experts are idle."""

from __future__ import annotations

import array
import contextlib
import functools
import heapq
import io
import itertools
import logging
import types
from collections import defaultdict
from fractions import Fraction

import pytest
import torch
from torch import nn

from moefx.errors import Refused

from ..blocks import Loop, rewritten

_LOG = logging.getLogger(__name__)


class Buckets(Loop):
    """Subclasses define how the rows of the experts are used."""

    def __init__(self):
        super().__init__(lambda: nn.Linear(6, 6), num_experts=6, k=1)

    def mixed(self, x, w, ids):
        buckets = [torch.where(ids == e) for e in range(len(self.experts))]
        return self.of_buckets(x, w, ids, buckets)

    def of_buckets(self, x, w, ids, buckets):
        raise NotImplementedError

    def run(self, x, w, buckets, scale=1.0):
        out = torch.zeros_like(x)
        for e, (t, k) in enumerate(buckets):
            if t.numel() == 0:
                continue
            out.index_add_(0, t, self.expert(e, x[t], w[t, k, None]))
        return out * scale if scale != 1.0 else out


# ---------------------------------------------------------------------- decisions that are refused


class Counted(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        active = 0
        for t, _ in buckets:
            if t.numel() == 0:
                continue
            active += 1
        return self.run(x, w, buckets, 0.5 if active == 2 else 1.0)  # decides


class Listed(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        idle = [e for e, (t, _) in enumerate(buckets) if len(t) == 0]
        if idle == [5]:  # decides
            x = x * 2
        return self.run(x, w, buckets)


class Text(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        occupied = "".join("x" if t.shape[0] else "." for t, _ in buckets)
        out = self.run(x, w, buckets)
        return out - x if occupied == "xxxxx." else out  # decides


class Flagged(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        flags = [False] * len(buckets)
        for e, (t, _) in enumerate(buckets):
            if t.numel() > 0:
                flags[e] = True
        return self.run(x, w.flip(-1) * 2 if sum(flags) == 5 else w, buckets)  # decides


class ForElse(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        rate = 1.0
        for t, _ in buckets[:-1]:
            if t.shape[0]:
                break
        else:
            rate = 0.5
        return self.run(x * rate, w, buckets)  # decides


class While(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        lead = 0
        while lead < 6 and buckets[lead][0].numel() == 0:  # decides
            lead += 1
        out = self.run(x, w, buckets)
        return out * 2 if lead == 4 else out


class Table(Buckets):
    scale = (1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 1.0)

    def of_buckets(self, x, w, ids, buckets):
        active = len([1 for t, _ in buckets if t.numel()])
        return self.run(x, w, buckets) * self.scale[active]  # decides


class Helper(Buckets):
    def active(self, buckets):
        return sum(1 for t, _ in buckets if t.shape[0] > 0)

    def of_buckets(self, x, w, ids, buckets):
        if self.active(buckets) == 5:  # decides
            return self.run(x, w, buckets) * 2
        return self.run(x, w, buckets)


class Unique(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        used = ids.unique().tolist()
        return self.run(x, w, buckets, 2.0 if len(used) == 5 else 1.0)  # decides


class Keys(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        used = set(ids.flatten().tolist())
        return self.run(x, w, buckets, 2.0 if len(used) == 5 else 1.0)  # decides


class Counts(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        counts = torch.bincount(ids.flatten(), minlength=6).tolist()
        busiest = counts.index(max(counts))
        return self.run(x, w, buckets, 2.0 if busiest == 5 and len(ids) > 1000 else 1.0)  # decides


class Runs(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        runs = [len(list(group)) for _, group in itertools.groupby(ids[:, 0].tolist())]
        return self.run(x, w, buckets, 2.0 if len(runs) == 1 else 1.0)  # decides


class Lambda(Buckets):
    has_rows = staticmethod(lambda rows: rows.numel() > 0)

    def of_buckets(self, x, w, ids, buckets):
        leading = list(itertools.takewhile(lambda bucket: bucket[0].shape[0] > 0, buckets))
        flags = [self.has_rows(t) for t, _ in buckets]
        if len(leading) == 5 and not flags[5]:  # decides
            x = x * 2
        return self.run(x, w, buckets)


class Masks(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        busy = [e for e in range(6) if (ids == e).any()]
        return self.run(x, w, buckets, 0.5 if busy == [0, 1] else 1.0)  # decides


def make_keeper(make, keep, ask):
    """Define a block that stores the busy experts in an object and reads their number."""

    class Keeps(Buckets):
        def of_buckets(self, x, w, ids, buckets):
            kept = make()
            for e, (t, _) in enumerate(buckets):
                if t.numel() == 0:
                    continue
                new = keep(kept, e)
                kept = kept if new is None else new
            return self.run(x, w, buckets, 0.5 if ask(kept) == 3 else 1.0)

    return Keeps


def count_sent():
    n = 0
    while True:
        n += yield n


_KEEPERS = {
    "a heap": make_keeper(list, lambda kept, e: heapq.heappush(kept, e), len),
    "an array": make_keeper(lambda: array.array("l"), lambda kept, e: kept.append(e), len),
    "a method of a list": make_keeper(list, lambda kept, e: list.append(kept, e), len),
    "an object": make_keeper(
        types.SimpleNamespace, lambda kept, e: setattr(kept, f"e{e}", e), lambda kept: len(vars(kept))
    ),
    "a tuple": make_keeper(tuple, lambda kept, e: (*kept, e), len),
    "a fraction": make_keeper(lambda: Fraction(0), lambda kept, e: kept + 1, lambda kept: kept),
    "a tensor of integers": make_keeper(lambda: torch.zeros((), dtype=torch.long), lambda kept, e: kept + 1, int),
}


class Aliased(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        busy = set()
        note = busy.add
        for e, (t, _) in enumerate(buckets):
            if t.numel():
                note(e)  # decides
        return self.run(x, w, buckets, 0.5 if len(busy) == 3 else 1.0)


class Written(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        stream = io.StringIO()
        for t, _ in buckets:
            if t.numel():
                stream.write("#")  # decides
        return self.run(x, w, buckets, 0.5 if stream.tell() == 3 else 1.0)


class Printed(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        stream = io.StringIO()
        for t, _ in buckets:
            if t.numel():
                print("#", file=stream)  # decides
        return self.run(x, w, buckets, 0.5 if stream.tell() == 6 else 1.0)


class Sent(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        counter = count_sent()
        next(counter)
        for t, _ in buckets:
            if t.numel():
                counter.send(1)  # decides
        return self.run(x, w, buckets, 0.5 if counter.send(0) == 3 else 1.0)


class Finally(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        busy = 0
        for t, _ in buckets:
            rows = None
            try:
                if t.numel() == 0:
                    continue
                rows = t
            finally:
                busy += rows is not None
        return self.run(x, w, buckets, 0.5 if busy == 3 else 1.0)  # decides


class Attribute(Buckets):
    collapsed = False

    def of_buckets(self, x, w, ids, buckets):
        if len([e for e, (t, _) in enumerate(buckets) if t.numel()]) == 1:  # decides
            self.collapsed = True
        return self.run(x, w, buckets)


class Caught(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        out = torch.zeros_like(x)
        for e, (t, k) in enumerate(buckets):
            rows = self.expert(e, x[t], w[t, k, None])
            try:
                rows = rows + rows[400]  # decides
            except IndexError:
                rows = rows * 1
            out.index_add_(0, t, rows)
        return out


class Raised(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        out, idle = torch.zeros_like(x), 0
        try:
            for e, (t, k) in enumerate(buckets):
                if t.numel() == 0:
                    idle += 1
                    continue
                out.index_add_(0, t, self.expert(e, x[t], w[t, k, None]))
            raise StopIteration
        except StopIteration:
            pass
        return out * 0.5 if idle == 1 else out  # decides


class RaisedByACall(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        idle = 0
        try:
            for t, _ in buckets:
                if t.numel() == 0:
                    idle += 1
            [].remove(idle)
            idle = 0
        except ValueError:
            pass
        return self.run(x, w, buckets, 0.5 if idle == 1 else 1.0)  # decides


class Suppressed(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        idle = 0
        for t, _ in buckets:
            if t.numel() == 0:
                idle += 1
        with contextlib.suppress(StopIteration):
            raise StopIteration
        return self.run(x, w, buckets, 0.5 if idle == 1 else 1.0)  # decides


class InAClass(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        kept = []
        for t, _ in buckets:

            class Expert:  # decides
                is_busy = t.numel() > 0

            kept.append(Expert)
        return self.run(x, w, buckets, 0.5 if sum(expert.is_busy for expert in kept) == 3 else 1.0)


class InADefault(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        kept = []
        for t, _ in buckets:

            def is_busy(answer=t.numel() > 0):  # decides  # noqa: B008
                return answer

            kept.append(is_busy)
        return self.run(x, w, buckets, 0.5 if sum(ask() for ask in kept) == 3 else 1.0)


class Returned(Buckets):
    def forward(self, x):
        w, ids = self.route(x)
        buckets = [torch.where(ids == e) for e in range(6)]
        return self.run(x, w, buckets), sum(t.numel() > 0 for t, _ in buckets) == 17


_DECISIONS = [
    Counted, Listed, Text, Flagged, ForElse, While, Table, Helper, Unique, Keys, Counts, Runs, Lambda, Masks,
    Aliased, Written, Printed, Sent, Finally, Attribute, Caught, Raised, RaisedByACall, Suppressed,
    InAClass, InADefault,
]  # fmt: skip


@pytest.mark.parametrize("kind", _DECISIONS)
def test_a_decision_by_idle_experts_is_refused_at_its_line(kind):
    with pytest.raises(Refused) as refusal:
        rewritten(kind(), torch.zeros(12, 6))
    assert any(
        text in str(refusal.value)
        for text in ("depends on which experts have tokens", "torch raises an error for some numbers")
    )
    file, line = refusal.value.source.split(":")
    with open(__file__) as lines:
        assert file == "test_idle_tests.py"
        assert "# decides" in lines.readlines()[int(line) - 1]
    assert refusal.value.remedy


@pytest.mark.parametrize("kind", _KEEPERS.values(), ids=_KEEPERS)
def test_storing_idle_experts_in_an_object_is_refused(kind):
    with pytest.raises(Refused, match=r"depends on which experts have tokens|reads a number that no op computes"):
        rewritten(kind(), torch.zeros(12, 6))


def test_an_outcome_is_not_returned():
    with pytest.raises(Refused, match="returns in Python which experts have tokens"):
        rewritten(Returned(), torch.zeros(40, 6))


class Alone(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        others = [t for t, _ in buckets[1:] if t.numel()]
        if len(x) > 12 and not others:
            return self.experts[0](x)
        return self.run(x, w, buckets)


def test_many_tokens_of_one_expert_have_the_form_of_others():
    with pytest.raises(Refused):
        rewritten(Alone(), torch.zeros(40, 6))


# ---------------------------------------------------------------------- experts that are skipped


class Skips(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        return self.run(x, w, buckets)


class Appends(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        rows, places = [], []
        for e, (t, k) in enumerate(buckets):
            if not t.numel():
                continue
            rows.append(self.expert(e, x[t], w[t, k, None]))
            places.append(t)
        if len(rows) == 0:
            return torch.zeros_like(x)
        _LOG.debug("%s experts are at work", len(rows))
        return torch.zeros_like(x).index_add(0, torch.cat(places), torch.cat(rows))


class Starts(Buckets):
    def mixed(self, x, w, ids):
        order = ids[:, 0].argsort(stable=True)
        start, rows = 0, []
        for e, count in enumerate(torch.bincount(ids[:, 0], minlength=6).tolist()):
            end = start + count
            if count == 0:
                continue
            t = order[start:end]
            rows.append(self.expert(e, x[t], w[t]))
            start = end
        out = torch.empty_like(x)
        out[order] = torch.cat(rows) if len(rows) else x[:0]
        return out


class Active(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        active = [e for e in range(6) if buckets[e][0].numel() > 0]
        out = torch.zeros_like(x)
        for e in active:
            t, k = buckets[e]
            out[t] += self.expert(e, x[t], w[t, k, None])
        return out


class Indexed(Buckets):
    def mixed(self, x, w, ids):
        masks = nn.functional.one_hot(ids[:, 0], 6).T
        out = torch.zeros_like(x)
        for active in (masks.sum(1) > 0).nonzero():
            e = active.item()
            (t,) = torch.where(masks[e])
            out[t] += self.expert(e, x[t], w[t])
        return out


class Dictionary(Buckets):
    def of_buckets(self, x, w, ids, buckets):
        found = {}
        for e, (t, k) in enumerate(buckets):
            busy = len(t) > 0
            if busy:
                found[e] = self.expert(e, x[t], w[t, k, None])
        out = torch.zeros_like(x)
        for e, rows in found.items():
            out.index_add_(0, buckets[e][0], rows)
        return out


class Lists(Buckets):
    def mixed(self, x, w, ids):
        out = torch.zeros_like(x)
        for e in ids.unique().tolist():
            tokens = (ids[:, 0] == e).nonzero().flatten().tolist()
            out[tokens] = self.expert(e, x[tokens], w[tokens])
        return out


class Early(Buckets):
    def rows(self, e, x, w):
        if x.shape[0] == 0:
            return None
        return self.expert(e, x, w)

    def of_buckets(self, x, w, ids, buckets):
        out = torch.zeros_like(x)
        for e, (t, k) in enumerate(buckets):
            rows = self.rows(e, x[t], w[t, k, None])
            if rows is not None:
                out = out.index_add(0, t, rows)
        return out


class Asked(Buckets):
    has_rows = staticmethod(lambda rows: rows.numel() > 0)

    def of_buckets(self, x, w, ids, buckets):
        out = torch.zeros_like(x)
        for e, (t, k) in enumerate(buckets):
            if self.has_rows(t):
                out[t] += self.expert(e, x[t], w[t, k, None])
        return out


class Combined(Buckets):
    def combine(self, rows, places, x):
        out = torch.zeros_like(x)
        for r, t in zip(rows, places, strict=True):
            out = out.index_add(0, t, r)
        return out

    def of_buckets(self, x, w, ids, buckets):
        rows = [self.expert(e, x[t], w[t, k, None]) for e, (t, k) in enumerate(buckets) if t.numel()]
        return self.combine(rows, [t for t, _ in buckets if t.numel()], x)


class Grouped(Buckets):
    def mixed(self, x, w, ids):
        tokens = defaultdict(list)
        for token, e in enumerate(ids[:, 0].tolist()):
            tokens[e].append(token)
        out = torch.zeros_like(x)
        for e, several in tokens.items():
            t = torch.tensor(several)
            out[t] = self.expert(e, x[t], w[t])
        return out


@pytest.mark.parametrize("kind", [Skips, Appends, Starts, Active, Indexed, Dictionary, Lists, Early, Asked, Combined])
def test_an_expert_without_tokens_is_left_out(kind):
    assert rewritten(kind(), torch.zeros(12, 6)).match.num_experts == 6


class Checked(Skips):
    """Check for NaN, which is no test of emptiness: any function may follow."""

    def forward(self, x):
        if torch.isnan(self.gate(x)).any():
            raise ValueError("not a number")
        return super().forward(scale_partially(x))


def scale_partially(x):
    return functools.partial(torch.mul, x)(1.0)


def test_a_check_for_nan_is_no_emptiness_test():
    assert rewritten(Checked(), torch.zeros(40, 6)).match.num_experts == 6


class Inherits(Skips):
    """Name the first argument `s`: calls of `super()` are followed anyway."""

    def of_buckets(s, x, w, ids, buckets):
        if buckets[0][0].numel() == 0:
            return super().of_buckets(x, w, ids, buckets)
        return super().of_buckets(x, w, ids, buckets)


def test_a_method_of_the_base_class_is_followed():
    assert rewritten(Inherits(), torch.zeros(40, 6)).match.num_experts == 6


def test_lists_of_tokens_by_expert_are_no_decision():
    assert rewritten(Grouped(), torch.zeros(12, 6)).match.num_experts == 6
