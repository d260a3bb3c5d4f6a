"""Mutations: a line of code for a hook, or a replacement in one base.

`same` explains why a mutant computes the same as its base. These mutants must also be equal after `compile`, and most
should be rewritten.
"""

# ruff: noqa: E501 (one mutation, one line)

from __future__ import annotations

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    hook: str = ""  # insert `code` at this hook
    code: str = ""
    base: str = ""  # replace `old` by `code` in this base only
    old: str = ""
    same: str = ""


def _parse_table(hook: str, text: str) -> list[Mutation]:
    """Parse lines `name: code`. Equivalent mutants end with `~ reason`."""
    mutations = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, rest = re.split(r":\s+", line, maxsplit=1)
        code, _, same = rest.partition("  ~ ")
        mutations.append(Mutation(f"{hook}_{name}", hook, code.strip().replace(";; ", "\n"), same=same))
    return mutations


LOGITS = """
    previous_token: logits = logits.roll(1, 0)
    centred_over_tokens: logits = (logits - logits.mean(0)) * 1.5
    temperature_by_size: logits = logits / (1 + 1 / t.shape[0])
    detached: logits = logits.detach()
    noise: logits = logits + 0.5 * torch.randn_like(logits)
    rounded_to_ties: logits = (logits * 2).round() / 2
    negated: logits = -logits
    first_token_for_all: logits = logits[:1] + 0 * logits
    running_mean: logits = logits.cumsum(0) / torch.arange(1, len(t) + 1, dtype=t.dtype)[:, None]
    bias_buffer: logits = logits + self.offset
    drifting_bias: logits = logits + self.offset;; with torch.no_grad(): self.offset.mul_(1.1)
    expert_zero_forbidden: logits = logits.index_fill(1, torch.tensor([0]), -1e9)
    single_precision: logits = logits.float().to(t.dtype)
    constant_shift: logits = logits + 3.0 if self.training else logits - 3.0  ~ softmax and topk ignore a shift
"""

ROUTED_WEIGHTS = """
    divided_by_load: w = w / F.one_hot(idx, E).sum((0, 1)).clamp(min=1).to(w.dtype)[idx]
    divided_by_tokens: w = w / t.shape[0]
    swapped: w = w.flip(-1)
    next_token: w = w.roll(1, 0)
    squared: w = w * w
    square_root: w = w.sqrt()
    detached: w = w.detach()
    partly_detached: w = 0.5 * w + 0.5 * w.detach()
    softmax_over_tokens: w = w.softmax(0)
    normalised_over_tokens: w = w / w.sum(0, keepdim=True)
    normalised_over_all: w = w / w.sum()
    first_weight_for_all: w = w[:, :1].expand_as(w)
    last_slot_zero: w = torch.cat([w[:, :-1], torch.zeros_like(w[:, -1:])], 1)
    large_batches_doubled: w = w * (2 if t.shape[0] > 8 else 1)
    more_tokens_than_slots: w = w * (2 if t.shape[0] > K else 1)
    branch_on_mean: w = w * (2 if float(w.mean()) > 0.3 else 1)
    branch_on_sign: w = w * (1 + int(t.mean() > 0))
    branch_on_first_value: w = w * (2 if t[0, 0] > 0 else 1)
    last_token_doubled: w = torch.cat([w[:-1], 2 * w[-1:]])
    first_token_doubled: w = torch.cat([2 * w[:1], w[1:]])
    last_token_in_place: w = w.clone();; w[-1] *= 2
    times_batch_maximum: w = w * t.detach().abs().amax()
    times_batch_maximum_grad: w = w * t.abs().amax()
    rounded: w = w.round(decimals=2)
    rounded_straight_through: w = w + (w.round(decimals=1) - w).detach()
    half_precision: w = w.bfloat16().to(w.dtype)
    single_precision: w = w.float().to(w.dtype)
    constant_added: w = w + 0.1
    clamped: w = w.clamp(max=0.35)
    times_logit: w = w * logits.gather(1, idx)
    small_ones_off: w = w * (w > 0.3)
    one_expert_negative: w = torch.where(idx == 2, -w, w)
    times_expert_id: w = w * (1 + idx)
    scaled_by_parameter: w = w * self.scale[idx]
    scaled_by_wrong_parameter: w = w * self.scale[(idx + 1) % E]
    times_load_numel: w = w * (1 + (idx == 0).nonzero().shape[0])
    times_load_item: w = w * (1 + (idx == 1).sum().item())
    times_distinct: w = w * idx.unique().numel()
    times_load_float: w = w * (1 + (idx == 3).to(w.dtype).mean())
    cumulated: w = w.cumsum(0)
    sorted_over_tokens: w = w.sort(0).values
    by_position: w = w * (1 + torch.arange(t.shape[0], dtype=w.dtype)[:, None])
    by_position_parity: w = w * (1 + torch.arange(t.shape[0])[:, None] % 2)
    drifting_scale: w = w * self.drift.exp();; with torch.no_grad(): self.drift.add_(0.05)
    stale_scale: with torch.no_grad(): self.drift.copy_(w.mean());; w = w * (1 + self.drift)
    python_counter: self.calls = self.calls + 1;; w = w * self.calls
    mode_dependent: w = w * (1.0 if self.training else 0.5) * 1.5
    grad_mode_dependent: w = w * (1.5 if torch.is_grad_enabled() else 0.5)
    noise: w = w * torch.rand_like(w)
    dropout: w = F.dropout(w, 0.3, self.training)
    no_grad_copy: with torch.no_grad(): w = w * 1
    first_id_scales: w = w * (1 + int(idx[0, 0]))
    ids_as_floats: w = w + 0.01 * idx.to(w.dtype)
    renormalised_l2: w = w / w.norm(dim=-1, keepdim=True)
    identity_clone: w = w.clone()  ~ a copy
    identity_times_one: w = w * torch.ones_like(w)  ~ a factor of one
    identity_renormalised: w = w / w.sum(-1, keepdim=True) * w.sum(-1, keepdim=True)  ~ divided and multiplied
    identity_double_flip: w = w.flip(-1).flip(-1)  ~ flipped twice
"""

ROUTED_IDS = """
    ids_permuted_by_buffer: idx = self.perm[idx]
    ids_shifted: idx = (idx + 1) % E
    ids_flipped: idx = idx.flip(-1)
    ids_coincide: idx = idx[:, :1].expand_as(idx)
    ids_of_previous_token: idx = idx.roll(1, 0)
    ids_sorted: idx = idx.sort(-1).values
    ids_clamped: idx = idx.clamp(max=E - 2)
    first_token_to_zero: idx = idx.clone();; idx[0] = 0
    last_token_to_two: idx = torch.cat([idx[:-1], torch.full_like(idx[-1:], 2)])
    ids_by_batch_parity: idx = (idx + t.shape[0] % 2) % E
    ids_by_position: idx = (idx + torch.arange(t.shape[0])[:, None]) % E
    ids_by_value_sign: idx = torch.where(t[:, :1] > 0, idx, (idx + 1) % E)
    ids_random: idx = torch.where(torch.rand(idx.shape) < 0.3, (idx + 1) % E, idx)
    most_loaded_moved: top = idx.flatten().bincount(minlength=E).argmax();; idx = torch.where(idx == top, (top + 1) % E, idx)
    moved_if_crowded: idx = (idx + 1) % E if int(idx.flatten().bincount(minlength=E).max()) > idx.numel() // 3 else idx
    moved_if_first_is_zero: idx = (idx + 1) % E if int(idx[0, 0]) == 0 else idx
    ids_through_lists: idx = torch.tensor([[e for e in row] for row in idx.tolist()])  ~ a copy through the host
    ids_through_numpy: idx = torch.from_numpy(idx.numpy().copy())  ~ a copy through the host
    ids_in_small_type: idx = idx.int().long()  ~ a round trip through int32
    ids_swapped_with_weights: idx, w = idx.flip(-1), w.flip(-1)  ~ the order of the slots (but for rounding)
    greedy_python: idx = torch.tensor([sorted(row) for row in idx.tolist()])
"""

ROWS = """
    centred: rows = rows - rows.mean(0, keepdim=True)
    times_count: rows = rows * (1 + 0.1 * n.numel())
    times_count_shape: rows = rows * (rows.shape[0] + 1)
    one_expert_clamped: rows = rows.clamp(-0.5, 0.5) if e == 2 else rows
    one_expert_detached: rows = rows.detach() if e == 1 else rows
    one_expert_negated: rows = -rows if e == 3 else rows
    detached: rows = rows.detach()
    last_row_doubled: rows = torch.cat([rows[:-1], 2 * rows[-1:]])
    previous_token: rows = t[n - 1]
    next_token: rows = t[(n + 1) % t.shape[0]]
    first_token_added: rows = rows + t[:1]
    batch_mean_added: rows = rows + t.mean(0)
    weighted_before: rows = rows * v
    in_place: rows = rows.clone();; rows *= 0.5
    first_row_zeroed: rows = rows.clone();; rows[:1] = 0
    single_precision: rows = rows.float().to(t.dtype)
    flipped: rows = rows.flip(0)
    features_flipped: rows = rows.flip(-1)
    columns_sorted: rows = rows.sort(0).values
    features_sorted: rows = rows.sort(-1).values
    doubled_if_many: rows = rows * 2 if len(n) > 3 else rows
    doubled_if_one: rows = rows * 2 if len(n) == 1 else rows
    dropout: rows = F.dropout(rows, 0.4, self.training)
    shuffled: rows = rows[torch.randperm(len(rows))]
    shifted_by_id: rows = rows + 0.1 * e
    scaled_by_parity: rows = rows * (1 + e % 2)
    branch_on_sum: rows = rows * 2 if float(rows.sum()) > 0 else rows
    cumulated: rows = rows.cumsum(0)
    divided_by_norm: rows = rows / (1 + rows.norm())
    divided_by_row_norm: rows = rows / (1 + rows.norm(dim=-1, keepdim=True))
    position_added: rows = rows + 0.1 * n[:, None].to(t.dtype)
    position_in_queue: rows = rows + 0.1 * torch.arange(len(rows), dtype=t.dtype)[:, None]
    logits_added: rows = rows + logits[n, e, None]
    identity_clone: rows = rows.clone()  ~ a copy
    identity_split: rows = torch.cat(rows.split(3)) if len(rows) else rows  ~ split and put together again
"""

HIDDEN = """
    one_expert_bent: h = h - h.square() if e == 1 else h
    one_expert_scaled: h = 1.5 * h if e == 4 else h
    normed_over_rows: h = h / (1 + h.std(0, unbiased=False))
    softmax_over_rows: h = h.softmax(0)
    softmax_over_units: h = h.softmax(-1)
    layer_norm: h = F.layer_norm(h, (H,))
    detached: h = h.detach()
    half_detached: h = 0.5 * (h + h.detach())
    times_rows: h = h * (1 + h.shape[0])
    clamped: h = h.clamp(max=0.1)
    scaled_per_expert: h = h * self.scale[e]
    scaled_by_other_expert: h = h * self.scale[(e + 1) % E]
    sign_straight_through: h = h + (h.sign() - h).detach()
    flipped_units: h = h.flip(-1)
    next_row: h = h + h.roll(1, 0)
    below_mean_off: h = torch.where(h > h.mean(), h, torch.zeros_like(h))
    first_unit_off: h = h.clone();; h[:, 0] = 0
    first_row_off: h = h.clone();; h[:1] = 0
    last_row_doubled: h = h.clone();; h[-1:] *= 2
    dropout: h = F.dropout(h, 0.4, self.training)
    no_grad: with torch.no_grad(): h = h * 1.0
    no_grad_one_expert: with torch.set_grad_enabled(e != 2 and torch.is_grad_enabled()): h = h * 1.0
    batch_norm: h = F.batch_norm(h, None, None, training=True) if len(h) > 1 else h
    random_sign: h = h * (torch.rand(H, dtype=h.dtype) - 0.5).sign()
    plus_running: h = h + self.drift
"""

OUT = """
    residual_per_slot: y = y + t[n]
    centred: y = y - y.mean(0, keepdim=True)
    times_rows: y = y * (1 + y.shape[0])
    one_expert_detached: y = y.detach() if e == 3 else y
    one_expert_tanh: y = y.tanh() if e == 0 else y
    first_expert_skipped: y = y * (0 if e == 0 else 1)
    tanh: y = torch.tanh(y)
    squared: y = y.square()
    single_precision: y = y.float().to(t.dtype)
    scaled_per_expert: y = y * self.scale[e]
    constant_added: y = y + 1.0
    id_added: y = y + 0.1 * e
    probability_added: y = y + p[n, e, None]
    times_probability: y = y * p[n, e, None]
    weight_twice: y = y * v
    weight_added: y = y + v
    first_row_off: y = y.clone();; y[:1] = 0
    rolled: y = y.roll(1, 0)
    even_tokens_only: y = y * (n[:, None] % 2 == 0)
    first_five_tokens_only: y = y * (n[:, None] < 5)
    rows_normed: y = F.layer_norm(y, (D,))
    global_norm: y = y / (1 + y.norm())
    many_rows_halved: y = y / 2 if y.shape[0] > 4 else y
    only_two_rows: y = y * (torch.arange(len(y)) < 2)[:, None]
    branch_on_value: y = y * 2 if len(y) and float(y.detach().flatten()[0]) > 0 else y
    noise: y = y + 0.1 * torch.randn_like(y)
    straight_through_input: y = t[n] + (y - t[n]).detach()
    double_from_other_expert: y = y + self.expert((e + 1) % E, rows)
    expert_zero_for_all: y = y + self.expert(0, rows)
    applied_twice: y = self.expert(e, y)
    next_expert: y = self.expert((e + 1) % E, rows)
"""

WEIGHTED = """
    halved: y = y / 2
    residual_unweighted: y = y + t[n] / K
    row_count: y = y / max(1, y.shape[0])
    previous_sum: y = y + (0.1 * out[n] if out is not None else 0)
    clamped: y = y.clamp(-0.05, 0.05)
    detached_copy: y = y + (y.detach() - y) * 0.5
    relu: y = y.relu()
    centred: y = y - y.mean(0)
"""

COMBINED = """
    mean_over_slots: out = out / K
    residual: out = out + t
    global_norm: out = out / (1 + out.norm())
    centred: out = out - out.mean(0)
    first_token_off: out = out.clone();; out[0] = 0
    last_token_doubled: out = torch.cat([out[:-1], 2 * out[-1:]])
    rolled: out = out.roll(1, 0)
    flipped: out = out.flip(0)
    big_batches_only: out = out * (t.shape[0] > 8)
    detached: out = out.detach() + 0 * t
    gradient_stopped: out = out + (out.detach() - out)
    positive_part: out = torch.where(out > 0, out, torch.zeros_like(out))
    drifting_scale: out = out * (1 + self.drift);; with torch.no_grad(): self.drift.add_(out.mean())
    stale_scale: with torch.no_grad(): self.drift.copy_(out.mean());; out = out * (1 + self.drift)
    python_state: previous, self.calls = self.calls, float(t.shape[0]);; out = out * (1 + previous)
    times_distinct: out = out * idx.unique().numel()
    times_host_distinct: out = out * (1 + len(set(idx.flatten().tolist())))
    divided_by_tokens: out = out / t.shape[0]
    spread_of_ids: out = out * (1 + idx.to(out.dtype).var())
    zero_where_first_choice_zero: out = out.masked_fill(idx[:, :1] == 0, 0.0)
    cumulated: out = out.cumsum(0)
    softmax: out = out.softmax(-1)
    dropout: out = F.dropout(out, 0.3, self.training)
    max_with_input: out = torch.maximum(out, t)
    squeezed_twice: out = out.tanh().tanh()
    order_bonus: out = out + (idx[:, :1] < idx[:, -1:]) * t
    load_in_features: out = out + F.one_hot(idx, E).sum((0, 1)).to(out.dtype).max()
    gradient_scaled: out = out * 2 - out.detach()
    identity_double_flip: out = out.flip(0).flip(0)  ~ flipped twice
    identity_reshaped: out = out.t().contiguous().t()  ~ transposed twice
"""


def _list_replacements(base: str, **edits: tuple[str, str] | tuple[str, str, str]) -> list[Mutation]:
    mutations = []
    for name, (old, new, *same) in edits.items():
        mutations.append(Mutation(name, base=base, old=old, code=new, same=same[0] if same else ""))
    return mutations


DROPS = _list_replacements(
    "CapacityEinsum",
    one_more_place=("place < capacity", "place <= capacity"),
    token_major=("F.one_hot(idx, E).transpose(0, 1).reshape(-1, E)", "F.one_hot(idx, E).reshape(-1, E)"),
    token_major_queue=(
        "place = ((slots.cumsum(0) - 1) * slots).sum(-1).view(K, -1).t()",
        "slots = F.one_hot(idx, E).reshape(-1, E);; place = ((slots.cumsum(0) - 1) * slots).sum(-1).view(-1, K)",
    ),
    last_come_first=("slots.cumsum(0) - 1", "slots.flip(0).cumsum(0).flip(0) - 1"),
    every_other=("keep = place < capacity", "keep = (place < capacity) & (place % 2 == 0)"),
    first_expert_unlimited=(
        "keep = place < capacity",
        "keep = (place < capacity) | (idx == 0) & (place < 0)",
        "the second condition never holds",
    ),
    second_choice_unlimited_weight=(
        "keep = place < capacity",
        "keep = place < capacity;; w = w * keep;; w = w / (w.sum(-1, keepdim=True) + 1e-9)",
    ),
    wrap_around=("keep = place < capacity", "place = place % capacity;; keep = place < capacity"),
    pile_up=("* keep.unsqueeze(-1)", ""),
    capacity_half=("K * t.shape[0] // E", "t.shape[0] // E"),
    capacity_fixed=("max(1, K * t.shape[0] // E)", "3"),
    capacity_from_load=(
        "max(1, K * t.shape[0] // E)",
        "max(1, int(F.one_hot(idx, E).sum((0, 1)).max()) - 1)",
    ),
    capacity_of_all=("max(1, K * t.shape[0] // E)", "t.shape[0]"),
    capacity_odd=("max(1, K * t.shape[0] // E)", "max(1, K * t.shape[0] // E) | 1"),
    dropped_pass=(
        "# @combined",
        "out = out + t * (1 - (w * keep).sum(-1, keepdim=True) / w.sum(-1, keepdim=True))",
    ),
    dropped_whole_token=(
        "keep = place < capacity",
        "keep = (place < capacity).all(-1, keepdim=True).expand_as(place)",
    ),
    empty_places_count=(
        "h = F.relu(torch.bmm(rows, self.w_up))",
        "h = F.relu(torch.bmm(rows, self.w_up)) + 0.1",
    ),
    places_mixed=(
        "y = torch.bmm(h, self.w_down)",
        "y = torch.bmm(h, self.w_down);; y = y - y.mean(1, keepdim=True)",
    ),
    experts_mixed=("y = torch.bmm(h, self.w_down)", "y = torch.bmm(h, self.w_down);; y = y + y.roll(1, 0)"),
    combine_unweighted=(
        '"nk,nke,nkc->nec", w, hot, spot',
        '"nk,nke,nkc->nec", torch.ones_like(w), hot, spot',
    ),
    dispatch_weighted=('"nke,nkc->nec", hot, spot', '"nke,nkc,nk->nec", hot, spot, w'),
    heaviest_first=(
        "keep = place < capacity",
        "other, mine = w.reshape(1, -1), w.reshape(-1, 1);; "
        "same = idx.reshape(1, -1) == idx.reshape(-1, 1);; "
        "place = ((other > mine) & same).sum(1).view(-1, K);; keep = place < capacity",
    ),
)

SPECIFIC = [
    *_list_replacements(
        "WhereLoop",
        assigned=("out = out.index_add(0, n, y)", "out = out.index_put((n,), y)"),
        wrong_slot=("w[n, k, None]", "w[n, K - 1 - k, None]"),
        first_slot_weight=("w[n, k, None]", "w[n, 0 * k, None]"),
        other_token_weight=("w[n, k, None]", "w[n - 1, k, None]"),
        first_choice_only=("torch.where(idx == e)", "torch.where((idx == e) & (torch.arange(K) == 0))"),
        at_least_e=("torch.where(idx == e)", "torch.where(idx >= e)"),
        last_expert_forgotten=("for e in range(E):", "for e in range(E - 1):"),
        first_expert_forgotten=("for e in range(E):", "for e in range(1, E):"),
        reversed_loop=("for e in range(E):", "for e in reversed(range(E)):", "sums in another order"),
        loop_stops_early=("for e in range(E):", "for e in range(min(E, t.shape[0])):"),
        queue_of_three=("rows, v = t[n], w[n, k, None]", "n, k = n[:3], k[:3];; rows, v = t[n], w[n, k, None]"),
        queue_from_behind=("rows, v = t[n], w[n, k, None]", "n, k = n[-3:], k[-3:];; rows, v = t[n], w[n, k, None]"),
        queue_by_size=("rows, v = t[n], w[n, k, None]", "c = len(t) // 3 + 1;; n, k = n[:c], k[:c];; rows, v = t[n], w[n, k, None]"),
        queue_every_other=("rows, v = t[n], w[n, k, None]", "n, k = n[::2], k[::2];; rows, v = t[n], w[n, k, None]"),
        queue_heaviest=("rows, v = t[n], w[n, k, None]", "at = w[n, k].topk(min(3, len(n))).indices;; n, k = n[at], k[at];; rows, v = t[n], w[n, k, None]"),
        queue_lightest=("rows, v = t[n], w[n, k, None]", "at = (-w[n, k]).topk(min(3, len(n))).indices;; n, k = n[at], k[at];; rows, v = t[n], w[n, k, None]"),
        queue_random=("rows, v = t[n], w[n, k, None]", "at = torch.randperm(len(n))[:3];; n, k = n[at], k[at];; rows, v = t[n], w[n, k, None]"),
        heavy_only=("rows, v = t[n], w[n, k, None]", "at = w[n, k] > 0.3;; n, k = n[at], k[at];; rows, v = t[n], w[n, k, None]"),
        output_shifted=("out.index_add(0, n, y)", "out.index_add(0, (n + 1) % len(t), y)"),
        output_unpermuted=("out.index_add(0, n, y)", "out.index_add(0, n.sort().values, y)", "n is sorted already"),
        output_permuted=("out.index_add(0, n, y)", "out.index_add(0, n.flip(0), y)"),
        averaged=("out.index_add(0, n, y)", "out.index_reduce(0, n, y, 'mean')"),
        maximum=("out.index_add(0, n, y)", "out.index_reduce(0, n, y, 'amax')"),
        topk_smallest=("p.topk(K, dim=-1)", "p.topk(K, dim=-1, largest=False)"),
        second_and_third=("w, idx = p.topk(K, dim=-1)", "w, idx = p.topk(K + 1, dim=-1);; w, idx = w[:, 1:], idx[:, 1:]"),
        softmax_over_tokens=("logits.softmax(-1)", "logits.softmax(0)"),
        different_weight=("return self.experts[e].down(h)", "return h @ self.experts[e].up.weight"),
        shared_down=("return self.experts[e].down(h)", "return self.experts[0].down(h)"),
        neighbour_down=("return self.experts[e].down(h)", "return self.experts[(e + 1) % E].down(h)"),
        last_two_share=("return self.experts[e].down(h)", "return self.experts[min(e, E - 2)].down(h)"),
        threshold_tie=("torch.where(idx == e)", "torch.where((idx == e) & (w > w.mean()))"),
    ),
    *_list_replacements(
        "SortSlices",
        off_by_one_slice=("order[start : start + count]", "order[start : start + count - 1]"),
        slice_shifted=("start += count", "start += max(count - 1, 0)"),
        counts_of_next=("enumerate(torch.bincount(flat, minlength=E).tolist())", "enumerate(torch.bincount(flat, minlength=E).roll(1).tolist())"),
        descending=("flat.argsort(stable=True)", "flat.argsort(stable=True, descending=True)"),
        wrong_token=("n = here // K", "n = here % t.shape[0]"),
        wrong_row_back=("buffer[here] = y", "buffer[here.flip(0)] = y"),
        first_rows_back=("buffer[here] = y", "buffer[:count] = y"),
        empty_weight=("if not count:", "if count < 2:"),
        mean_of_slots=("buffer.view(-1, K, D).sum(1)", "buffer.view(-1, K, D).mean(1)"),
        maximum_of_slots=("buffer.view(-1, K, D).sum(1)", "buffer.view(-1, K, D).amax(1)"),
        product_of_slots=("buffer.view(-1, K, D).sum(1)", "buffer.view(-1, K, D).prod(1)"),
        slot_major_view=("buffer.view(-1, K, D).sum(1)", "buffer.view(K, -1, D).sum(0)"),
        unstable_order=("argsort(stable=True)", "argsort()", "every row goes back to where it came from"),
        first_slot_twice=("buffer.view(-1, K, D).sum(1)", "buffer.view(-1, K, D)[:, :1].sum(1) * 2"),
    ),
    *_list_replacements(
        "DenseMasked",
        all_experts_leak=("(w * (idx == e)).sum(-1, keepdim=True)", "(w * (idx == e)).sum(-1, keepdim=True) + 0.01"),
        probability_leak=("(w * (idx == e)).sum(-1, keepdim=True)", "p[:, e, None]"),
        soft_threshold=("(w * (idx == e)).sum(-1, keepdim=True)", "p[:, e, None] * (p[:, e, None] >= w[:, -1:])"),
        soft_threshold_strict=("(w * (idx == e)).sum(-1, keepdim=True)", "p[:, e, None] * (p[:, e, None] > w[:, -1:])"),
        straight_through_gates=("(w * (idx == e)).sum(-1, keepdim=True)", "(p[:, e, None] + ((w * (idx == e)).sum(-1, keepdim=True) - p[:, e, None]).detach())"),
        mean_gate=("(w * (idx == e)).sum(-1, keepdim=True)", "(w * (idx == e)).mean(-1, keepdim=True)"),
        max_gate=("(w * (idx == e)).sum(-1, keepdim=True)", "(w * (idx == e)).amax(-1, keepdim=True)", "an expert is chosen once at the most"),
        wrong_expert_gate=("(w * (idx == e)).sum(-1, keepdim=True)", "(w * (idx == (e + 1) % E)).sum(-1, keepdim=True)"),
    ),
    *_list_replacements(
        "WeightGather",
        other_gate_matrix=("self.w_gate[idx]", "self.w_gate[idx.flip(-1)]"),
        first_matrix=("self.w_down[idx]", "self.w_down[idx[:, :1]].expand(-1, K, -1, -1)"),
        previous_token_matrix=("self.w_up[idx]", "self.w_up[idx.roll(1, 0)]"),
        transposed_pairs=('"nkh,nkhd->nkd"', '"njh,nkhd->nkd"'),
        averaged_matrices=("self.w_down[idx]", "self.w_down[idx].mean(1, keepdim=True).expand(-1, K, -1, -1)"),
        cross_slots=("h = h * torch.einsum", "h = h.flip(1) * torch.einsum"),
        token_mixing=('"nd,nkdh->nkh", t, self.w_up[idx]', '"nd,nkdh->nkh", t - t.mean(0), self.w_up[idx]'),
    ),
    *_list_replacements(
        "WeightBefore",
        bias_behind=("h = F.silu(torch.bmm(every, self.w_gate))", "h = 0.1 + F.silu(torch.bmm(every, self.w_gate))"),
        inner_bias=("torch.bmm(every, self.w_up)", "(torch.bmm(every, self.w_up) + 0.3)"),
        cosine=("F.silu(torch.bmm(every, self.w_gate))", "torch.cos(torch.bmm(every, self.w_gate))", ),
        leaking_gates=("torch.zeros_like(logits).scatter", "torch.full_like(logits, 0.01).scatter"),
        masked_infinite=("torch.zeros_like(logits).scatter(-1, idx, w)", "torch.full_like(logits, float('-inf')).scatter(-1, idx, val).sigmoid()", "sigmoid(-inf) = 0"),
        normalised_gates=("torch.zeros_like(logits).scatter(-1, idx, w)", "F.normalize(torch.zeros_like(logits).scatter(-1, idx, w), dim=0)"),
    ),
    *_list_replacements(
        "TopOneAssign",
        added=("out[n] = y", "out[n] += y", "every row is written once"),
        min_instead=("p.max(-1, keepdim=True)", "p.min(-1, keepdim=True)"),
        clone_start=("out = torch.zeros_like(t)", "out = t.clone()", "every row is overwritten"),
        clone_start_skip=("for e in range(E):", "out = t.clone();; for e in range(E - 1):"),
        softmax_max_over_tokens=("logits.softmax(-1)", "logits.softmax(0)"),
        uninitialised_skip=("for e in range(E):", "for e in range(0, E, 2):"),
    ),
    *_list_replacements(
        "TokenLoop",
        first_choice_twice=("int(idx[token, k])", "int(idx[token, 0])"),
        neighbour_choice=("int(idx[token, k])", "int(idx[token - 1, k])"),
        last_token_skipped=("total = 0\n", "total = 0 * t[:1]\n            if token == t.shape[0] - 1: sums.append(total); continue\n"),
        running_total=("total = 0\n", "total = 0.5 * sums[-1] if sums else 0\n"),
        early_stop=("for k in range(K):", "for k in range(K if token % 3 else 1):"),
        confident_stop=("for k in range(K):", "for k in range(1 if float(w[token, 0]) > 0.4 else K):"),
    ),
]  # fmt: skip

MUTATIONS: list[Mutation] = [
    *_parse_table("logits", LOGITS),
    *_parse_table("routed", ROUTED_WEIGHTS),
    *_parse_table("routed", ROUTED_IDS),
    *_parse_table("rows", ROWS),
    *_parse_table("hidden", HIDDEN),
    *_parse_table("out", OUT),
    *_parse_table("weighted", WEIGHTED),
    *_parse_table("combined", COMBINED),
    *DROPS,
    *SPECIFIC,
]

# Mutations that change nothing in a base: one row cannot be mixed, one slot cannot be swapped, ...
NOT_FOR = {
    "TokenLoop": """rows_flipped rows_shuffled rows_cumulated rows_columns_sorted rows_position_in_queue
        rows_doubled_if_many hidden_batch_norm hidden_normed_over_rows out_rolled out_only_two_rows
        out_many_rows_halved weighted_row_count weighted_previous_sum""",
    "TopOneAssign": """routed_swapped routed_ids_coincide routed_ids_flipped routed_ids_sorted
        routed_first_weight_for_all routed_greedy_python combined_order_bonus routed_last_slot_zero
        routed_ids_swapped_with_weights combined_mean_over_slots""",
    "AnyMask": "logits_constant_shift",
    "WeightBefore": "logits_constant_shift routed_small_ones_off",
    "SortSlices": "weighted_previous_sum",
}
