"""`ops/pack.py` with boxes that lie one behind the other in a bucket, wherever that is."""

import pytest
import torch
from test_pack import BF16, F32, assert_same, empty_bucket, random_base, slot

from megarl.ops.pack import Box, PackTable

PLACED = [  # dtype, shape, dtype in the bucket: sizes that leave the next one at odd places
    (F32, (3, 8), F32),
    (torch.int16, (9, 11), torch.int16),
    (F32, (5, 3), BF16),
    (BF16, (2, 7), F32),
    (torch.uint8, (3, 7), torch.uint8),
    (torch.uint8, (64, 1), torch.uint8),
]


def test_dense_boxes_there_and_back(backend, device):
    wide = [random_base(shape[0] * 16, dtype, i) for i, (dtype, shape, _) in enumerate(PLACED)]
    offsets, end = [], 4
    for _, shape, to in PLACED:
        end += -end % to.itemsize
        offsets.append(end)
        end += shape[0] * shape[1] * to.itemsize
    assert sum(offset % 16 == 0 for offset in offsets) <= 1
    views, boxes = [], []
    for base, (_, shape, to) in zip(wide, PLACED, strict=True):
        views.append(base.view(shape[0], 16)[:, 1 : 1 + shape[1]])
        boxes.append(Box(base.to(device).view(shape[0], 16)[:, 1 : 1 + shape[1]], dtype=to))
    table = PackTable(boxes, offsets=offsets, is_dense=True)
    bucket = empty_bucket(table.num_bytes, device)
    table.pack(bucket)
    got = bucket.cpu()
    for view, offset, (dtype, _, to) in zip(views, offsets, PLACED, strict=True):
        assert_same(slot(got, offset, view, to), view.to(to), dtype != to)
        got[offset : offset + view.numel() * to.itemsize] = 0xA5
    assert (got == 0xA5).all()
    for box in boxes:
        box.tensor.view(torch.uint8)[:] = 0
    table.unpack(bucket)
    for box, offset, (dtype, _, to) in zip(boxes, offsets, PLACED, strict=True):
        sent = slot(bucket.cpu(), offset, box.tensor, to)
        assert_same(box.tensor.cpu(), sent.to(dtype), dtype != to)


def test_dense_offsets_are_whole_elements():
    x = torch.zeros(6, 8)
    with pytest.raises(ValueError, match="multiples of 2, got"):
        PackTable([Box(x, dtype=BF16)], offsets=[3], is_dense=True)
    PackTable([Box(x, dtype=BF16)], offsets=[2], is_dense=True)
