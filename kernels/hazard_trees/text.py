"""Device functions for the text that a request emitted: take in tokens, look drafts up.

Tiles of one request, [16]. A token id of -1 stands for "there is none".
"""

# Launch options and static ranges are not in triton's annotations.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from hybridspec.kernels.hazard_trees.state import MIX, TOKEN_BITS

_MIX = tl.constexpr(MIX)
_BITS = tl.constexpr(TOKEN_BITS)


@triton.jit
def place(key, ENTRIES: tl.constexpr):
    """Where keys lie in a table of ENTRIES places."""
    return ((key * _MIX) >> 40) & (ENTRIES - 1)


@triton.jit
def shifted(p_tokens, o_token, back: tl.constexpr, mask, newest, second):
    """Tokens `back` places before each; the request's last two stand before the first."""
    token = tl.load(p_tokens + o_token - back, mask=mask & (o_token >= back), other=-1)
    token = token.to(tl.int64)
    if back == 1:
        return tl.where(o_token == 0, newest, token)
    else:
        return tl.where(o_token == 0, second, tl.where(o_token == 1, newest, token))


@triton.jit
def keys(token, first, second):
    """Keys of the n-grams that end with each token: one, two and three tokens long."""
    first = tl.where(first >= 0, first, 0)
    second = tl.where(second >= 0, second, 0)
    pair = (first << _BITS) | token
    return token, pair, (second << (2 * _BITS)) | pair


@triton.jit
def _replaced(at, valid, o_token):
    """Whether a later token of the tile goes to the same place."""
    later = (o_token[None, :] > o_token[:, None]) & valid[None, :]
    return tl.max((later & (at[None, :] == at[:, None])).to(tl.int32), 1) > 0


@triton.jit
def _put(p_table, at, entry, valid, o_token):
    tl.store(p_table + at, entry, mask=valid & (_replaced(at, valid, o_token) == 0))


@triton.jit
def take_in(p_tables, p_tokens, count, newest, second, ENTRIES: tl.constexpr):
    """Write the first `count` tokens of a row of 16 into the tables, as if one after the other."""
    o_token = tl.arange(0, 16)
    valid = o_token < count
    token = tl.load(p_tokens + o_token, mask=valid, other=0).to(tl.int64)
    valid = valid & (token >= 0)
    first = shifted(p_tokens, o_token, 1, valid, newest, second)
    before = shifted(p_tokens, o_token, 2, valid, newest, second)
    one, two, three = keys(token, first, before)
    has_two = valid & (first >= 0)
    has_three = has_two & (before >= 0)
    _put(p_tables, place(one, ENTRIES), one, valid, o_token)
    _put(p_tables + ENTRIES, place(two, ENTRIES), two, has_two, o_token)
    _put(p_tables + 2 * ENTRIES, place(three, ENTRIES), three, has_three, o_token)
    _put(p_tables + 3 * ENTRIES, place(three >> _BITS, ENTRIES), three, has_three, o_token)


@triton.jit
def look_up(p_tables, token, first, second, live, ENTRIES: tl.constexpr):
    """Length of the longest known n-gram that ends with each draft, and the successor's verdict."""
    one, two, three = keys(token, first, second)
    has_two = first >= 0
    has_three = has_two & (second >= 0)
    pair = three >> _BITS
    at_one = tl.load(p_tables + place(one, ENTRIES), mask=live, other=-1)
    at_two = tl.load(p_tables + ENTRIES + place(two, ENTRIES), mask=live, other=-1)
    at_three = tl.load(p_tables + 2 * ENTRIES + place(three, ENTRIES), mask=live, other=-1)
    follower = tl.load(p_tables + 3 * ENTRIES + place(pair, ENTRIES), mask=live, other=-1)
    seen_one = at_one == one
    seen_two = seen_one & has_two & (at_two == two)
    seen_three = seen_two & has_three & (at_three == three)
    seen = seen_one.to(tl.float32) + seen_two.to(tl.float32) + seen_three.to(tl.float32)
    known = has_three & (follower >= 0) & ((follower >> _BITS) == pair)
    verdict = tl.where(follower == three, 1.0, -1.0)
    return seen, tl.where(known, verdict, 0.0)
