"""How a tile walks the weight: snippets for the templates of kernels/tiles.py, plain and listed.

A plain tile computes the weight rows j0..j1. A listed one computes those that the ids at n (int64) name, j0..j1 being
places of that list and of y. The templates are the same, so a listed row has the plain row's bits; what differs is

    row, blocks, block   where row or block j begins
    ahead                what is prefetched: at the end of a listed row or block the next of the list, not its neighbour
    store                N16 only: a list's blocks are computed whole, once for each stretch of ids that lie in one, and
                         the listed lanes are stored

Listed blocks computed together are neighbours in the list, so that a list that is dense at one end and thin at the
other keeps all streams busy. They are prefetched 4096 + 64 bytes in front: a block is whole groups of 1024 and 64 bytes
of scales, so the step to the next one falls between two groups. Measured: tests/bench/listed.py.
"""

from __future__ import annotations

ROWS = {
    "row": """
row{j} = at{j}
""",
    "ahead": """
each j:
    f{j} = w{j} + i * {width} + {AHEAD}
""",
}
LISTED_ROWS = {
    "row": """
row{j} = ai(n, at{j})
skip{j} = (ai(n, min(at{j} + 1, j1 - 1)) - row{j} - 1) * row
""",
    "ahead": """
over = (row - {AHEAD + 1} - i * {width}) >> 63
each j:
    f{j} = w{j} + i * {width} + {AHEAD} + (skip{j} & over)
""",
}
# N16, J blocks at a time: int8
BLOCKS = {
    "blocks": """
part = ((j1 - j0 + 15) // 16 + {J - 1}) // {J} * 16
for top in range(j0, j0 + part, 16):
    each j:
        top{j} = min(top + {j} * part, (j1 - 1) // 16 * 16)
        w{j} = w + top{j} // 16 * size
""",
    "ahead": """
each j:
    f{j} = w{j} + {AHEAD}
""",
    "store": """
st_f32_tail(y{r} + top{j} * 4, total, j1 - top{j})
""",
}
LISTED_BLOCKS = {
    "blocks": """
at = j0
while at < j1:
    each j:
        top{j} = at
        block{j} = ai(n, min(at, j1 - 1)) >> 4
        w{j} = w + block{j} * size
        at = block_end(n, at, j1)
        end{j} = at
    after = at
    each j:
        skip{j} = ((ai(n, min(after, j1 - 1)) >> 4) - block{j} - 1) * size
        after = block_end(n, after, j1)
""",
    "ahead": """
over = (groups - 5 - g) >> 63
each j:
    f{j} = w{j} + {AHEAD + 64} + (skip{j} & over)
""",
    "store": """
for i in range(top{j}, end{j}):
    st1_f32(y{r} + i * 4, lane(total, ai(n, i) & 15))
""",
}
# of block-quantised kinds, whose groups have other sizes: a superblock that reaches over the end is asked for there
BLOCKED_AHEAD = {
    "ahead": """
over = (size - 1 - g * {BYTES} - {AHEAD}) >> 63
each j:
    f{j} = w{j} + {AHEAD} + (skip{j} & over)
""",
}
# N16, a block at a time: int8f
BLOCK = {
    "block": """
for top in range(j0, j1, 16):
    p = w + top // 16 * (groups * 1024 + 64)
""",
    "store": """
st_f32_tail(y{r} + top * 4, total, j1 - top)
""",
}
LISTED_BLOCK = {
    "block": """
end = j0
while end < j1:
    top = end
    end = block_end(n, top, j1)
    p = w + (ai(n, top) >> 4) * (groups * 1024 + 64)
""",
    "store": """
for i in range(top, end):
    st1_f32(y{r} + i * 4, lane(total, ai(n, i) & 15))
""",
}
