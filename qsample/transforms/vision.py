"""A Hugging Face model that reads images enters; the module that vision.onnx is traced from leaves:
an image's pixels in, its rows of `image_features` out.

Towers are transformers' code as it is. They are of two kinds. One reads patches and takes an
image's rows and columns of patches, `grid`: what depends on them is computed from indices, in place
of loops over numbers that a trace would fix
(https://github.com/huggingface/transformers/blob/main/src/transformers/vision_utils.py). The other
reads tiles. Attention is asked for as FlashAttention is: then a tower makes no mask, and calls it
once for all patches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from qsample.contract.tensors import (
    GRID,
    HEIGHT,
    IMAGE_FEATURES,
    PATCHES,
    PIXEL_VALUES,
    TILES,
    WIDTH,
)
from qsample.errors import UnsupportedModelError

# transformers treats an attention with "flash" in its name as FlashAttention.
_ATTENTION: Final = "qsample_flash_vision"
_MASKED_SCORE: Final = -1e30
# The image that is traced has this many rows and columns of features, or this many tiles.
_EXAMPLE_SIZE: Final = (4, 6)
_EXAMPLE_TILES: Final = 2


class RandomImage:
    """An image of random pixels, which are the same for each size.

    Attributes:
        pixels: the pixels.
        grid: the rows and columns of patches; None for tiles.
        inputs: the inputs of vision.onnx by name.
        arguments: the arguments of transformers' get_image_features by name.
    """

    def __init__(self, pixels: Tensor, grid: Tensor | None = None, **arguments: Any) -> None:
        self.pixels = pixels
        self.grid = None if grid is None else grid.tolist()
        self.inputs = {PIXEL_VALUES: pixels}
        if grid is not None:
            self.inputs[GRID.name] = grid
        self.arguments = {PIXEL_VALUES: pixels, **arguments}


class VisionModule(nn.Module):
    """The graph vision.onnx as a module: `forward` maps its inputs by name to its output by name.

    Attributes:
        free: the axes of the inputs whose sizes depend on the image.
        by_tiles: whether the number of tiles is the size of an image.
        model: the base model of the checkpoint.
        tower: the vision tower of the model.
        rows: computes the features [F, C] from the inputs in order.
    """

    free: tuple[str, ...] = (PATCHES,)
    by_tiles = False
    model: Any
    tower: Any
    rows: Callable[..., Tensor]

    def __init__(self, model: PreTrainedModel, tower: PreTrainedModel) -> None:
        super().__init__()
        self.model = model.base_model
        self.tower = tower
        self._dtype = model.dtype
        self._behind = [name for name, part in self.model.named_children() if part is not tower]

    @property
    def example(self) -> dict[str, Tensor]:
        """Inputs that a trace can run."""
        rows, columns = (_EXAMPLE_TILES, 1) if self.by_tiles else _EXAMPLE_SIZE
        return self.image(rows, columns).inputs

    def image(self, rows: int, columns: int) -> RandomImage:
        """An image with that many rows and columns of features, or of tiles."""
        raise NotImplementedError

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pixels, *grid = inputs.values()
        with _for_a_trace(self.tower):
            rows = self.rows(pixels.to(self._dtype), *grid)
        return {IMAGE_FEATURES: rows.to(self._dtype)}

    def projected(self, pixel_values: Tensor, **options: Any) -> Tensor:
        """[F, C], the result of the projector in get_image_features.

        What get_image_features does with it afterwards, such as making a list of an image's rows,
        is not run."""
        found: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Tensor) -> _Unread:
            found.append(output)
            return _Unread()

        hooks = [getattr(self.model, name).register_forward_hook(keep) for name in self._behind]
        try:
            with suppress(_ReadError):
                self.model.get_image_features(pixel_values, **options)
        finally:
            for hook in hooks:
                hook.remove()
        if len(found) != 1:
            raise UnsupportedModelError(
                f"{type(self.model).__name__} has no single projector behind its vision tower"
            )
        return found[0].flatten(0, -2)


class _ReadError(Exception):
    pass


class _Unread:
    """Stands for a result that nothing may read."""

    def __getattr__(self, name: str) -> Any:
        raise _ReadError

    def __iter__(self) -> Any:
        raise _ReadError


class _MergedPatches(VisionModule):
    """Qwen2-VL and its successors, GLM-4V: the patches of a row of features follow one another."""

    def image(self, rows: int, columns: int) -> RandomImage:
        config = self.tower.config
        merge = self.tower.spatial_merge_size
        grid = torch.tensor([rows * merge, columns * merge])
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return RandomImage(_random(int(grid.prod()), values), grid, image_grid_thw=_with_time(grid))

    def rows(self, pixel_values: Tensor, grid: Tensor) -> Tensor:
        tower = self.tower
        merge = self.tower.spatial_merge_size
        count = pixel_values.shape[0]
        row, column = places_of_patches(grid, count, merge)
        options: dict[str, Any] = {
            "position_ids": torch.stack([row, column], -1),
            "cu_seqlens": torch.arange(2, dtype=torch.int32) * count,
            "max_seqlen": count,
        }
        if hasattr(tower, "window_size"):
            side = tower.window_size // merge // tower.patch_size * merge
            options["window_index"] = torch.arange(count // merge**2)
            options["cu_window_seqlens"] = windows_of(row, column, grid, side, merge)
            options["max_window_seqlen"] = side**2
        if hasattr(tower, "num_grid_per_side"):
            options |= resampled(tower, row, column, grid)
        output = tower(pixel_values, grid_thw=_with_time(grid), **options)
        return torch.cat(
            [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())], -1
        )


class _PositionedPatches(VisionModule):
    """Gemma 4: patches in rows, each with its column and row, and pooled in squares."""

    def image(self, rows: int, columns: int) -> RandomImage:
        config = self.tower.config
        grid = torch.tensor([rows, columns]) * config.pooling_kernel_size
        pixels = _random(int(grid.prod()), 3 * config.patch_size**2)
        image = RandomImage(pixels, grid, image_position_ids=_places(grid, len(pixels)))
        image.arguments[PIXEL_VALUES] = pixels[None]
        return image

    def rows(self, pixel_values: Tensor, grid: Tensor) -> Tensor:
        functional: Any = nn.functional
        own = functional.one_hot
        # A trace would fix the number of squares.
        functional.one_hot = lambda index, count: (index[..., None] == torch.arange(count)).to(
            torch.int64
        )
        try:
            return self.projected(
                pixel_values[None], image_position_ids=_places(grid, pixel_values.shape[0])
            )
        finally:
            functional.one_hot = own


class _Tiles(VisionModule):
    """Tiles of one size, such as LLaVA's: a tile's rows of features after another's, then the
    learned newline, if there is one. transformers' rows of LLaVA-NeXT are in another order, and
    without those of padding."""

    free = (TILES,)
    by_tiles = True

    def image(self, rows: int, columns: int) -> RandomImage:
        config = self.model.config
        size = self.tower.config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        points = getattr(config, "image_grid_pinpoints", None)
        if points is None:
            return RandomImage(_random(rows * columns, 3, height, width))
        # The shape that is possible and nearest: the tiles behind an overview.
        shapes = [(point[0] // height, point[1] // width) for point in points]
        down, across = min(shapes, key=lambda shape: abs(shape[0] - rows) + abs(shape[1] - columns))
        sizes = torch.tensor([[down * height, across * width]])
        return RandomImage(_random(1 + down * across, 3, height, width), image_sizes=sizes)

    def rows(self, pixel_values: Tensor) -> Tensor:
        sizes = _parameters(self.model.get_image_features).get("image_sizes")
        needed = sizes is not None and sizes.default is sizes.empty
        rows = self.projected(pixel_values, **({"image_sizes": []} if needed else {}))
        newline = getattr(self.model, "image_newline", None)
        return rows if newline is None else torch.cat([rows, newline[None]])


class _MaskedTiles(_Tiles):
    """SmolVLM and Idefics3. Their get_image_features drops tiles whose pixels are all 0."""

    def __init__(self, model: PreTrainedModel, tower: Any) -> None:
        super().__init__(model, tower)
        # bucketize, of which a tile's positions come, does not export; they are the same for all
        # whole tiles.
        embeddings = tower.embeddings
        tile = self.image(1, 1).inputs[PIXEL_VALUES]
        found = list[Tensor]()
        hook = embeddings.position_embedding.register_forward_pre_hook(
            lambda module, args: found.append(args[0])
        )
        with torch.no_grad():
            embeddings(
                tile.to(model.dtype),
                torch.ones(
                    1, *(size // tower.patch_size for size in tile.shape[2:]), dtype=torch.bool
                ),
            )
        hook.remove()
        self._positions = found[0]

    def image(self, rows: int, columns: int) -> RandomImage:
        image = super().image(rows, columns)
        image.arguments[PIXEL_VALUES] = image.inputs[PIXEL_VALUES][None]
        return image

    def rows(self, pixel_values: Tensor) -> Tensor:
        table: Any = self.tower.embeddings.position_embedding
        hook = table.register_forward_pre_hook(lambda module, args: (self._positions,))
        try:
            states = self.tower(pixel_values).last_hidden_state
        finally:
            hook.remove()
        rows: Tensor = self.model.connector(states)
        return rows.flatten(0, 1)


class _AnySize(VisionModule):
    """Pixtral's tower: one tile, the whole image, of any height and width."""

    free = (HEIGHT, WIDTH)

    def image(self, rows: int, columns: int) -> RandomImage:
        side = self.tower.patch_size * getattr(self.model.config, "spatial_merge_size", 1)
        sizes = torch.tensor([[rows * side, columns * side]])
        return RandomImage(_random(1, 3, *sizes[0].tolist()), image_sizes=sizes)

    def rows(self, pixel_values: Tensor) -> Tensor:
        return self.projected(pixel_values, image_sizes=[tuple(pixel_values.shape[2:])])


def vision_module(model: PreTrainedModel) -> VisionModule:
    """The module of vision.onnx; UnsupportedModelError if `model` has no tower."""
    tower = model.get_encoder(modality="image")
    if not isinstance(tower, PreTrainedModel) or tower is model:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no vision tower; export its text alone (--text-only)"
        )
    kinds = {
        "grid_thw": _MergedPatches,
        "pixel_position_ids": _PositionedPatches,
        "patch_attention_mask": _MaskedTiles,
        "image_sizes": _AnySize,
    }
    parameters = _parameters(tower.forward)
    return next((kind for name, kind in kinds.items() if name in parameters), _Tiles)(model, tower)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | Windows | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in every layer of a tower: query [B, heads, S,
    D], key and value [B, H, S, D] → [B, S, heads, D]. attention_mask: added to the scores.
    cu_seq_lens_q: windows, or all of a row."""
    heads = query.shape[1]
    if (groups := heads // key.shape[1]) > 1:
        key = key.repeat_interleave(groups, 1)
        value = value.repeat_interleave(groups, 1)
    states = [part.transpose(1, 2).flatten(2) for part in (query, key, value)]
    if not isinstance(cu_seq_lens_q, Windows):
        output = _multi_head(states, heads, scaling, attention_mask)
    else:
        windows = cu_seq_lens_q
        count, places = windows.patches.shape
        mask = torch.where(windows.held, 0.0, _MASKED_SCORE)[:, None, None].expand(
            count, 1, places, places
        )
        output = _multi_head([part[0][windows.patches] for part in states], heads, scaling, mask)
        output = output.flatten(0, 1)[windows.places][None]
    return output.reshape(*output.shape[:2], heads, -1), None


def _multi_head(
    states: Sequence[Tensor], heads: int, scale: float | None, mask: Tensor | None
) -> Tensor:
    """[B, S, heads * D], of queries, keys and values of that shape."""
    query = states[0]
    inputs = [*states, *([] if mask is None else [None, None, mask.to(query.dtype)])]
    return torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        inputs,
        {
            "num_heads": heads,
            "scale": float((query.shape[-1] // heads) ** -0.5 if scale is None else scale),
        },
        dtype=query.dtype,
        shape=(*query.shape[:2], states[2].shape[-1]),
        version=1,
    )


@contextmanager
def attention_of(tower: nn.Module, name: str) -> Iterator[None]:
    """While open, `tower` attends through the function of this name in transformers' attention
    interface."""
    configs = {
        id(part.config): part.config
        for part in tower.modules()
        if isinstance(part, PreTrainedModel)
    }.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, own in zip(configs, before, strict=True):
            config._attn_implementation = own


@contextmanager
def _for_a_trace(tower: nn.Module) -> Iterator[None]:
    """While open, `tower` attends through `attention`, and its convolutions with a single place are
    products: as convolutions they are slow, and an exporter writes a bias of a wrong shape for
    those without."""
    AttentionInterface.register(_ATTENTION, attention)
    convolutions = [part for part in tower.modules() if isinstance(part, nn.Conv2d | nn.Conv3d)]
    with attention_of(tower, _ATTENTION):
        for part in convolutions:
            part.forward = functools.partial(_convolved, part)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for part in convolutions:
                del part.forward


def _convolved(module: nn.Conv2d | nn.Conv3d, states: Tensor) -> Tensor:
    padded = module.padding != "valid" and any(module.padding)
    if tuple(states.shape[2:]) != tuple(module.kernel_size) or padded or module.groups > 1:
        own: Any = type(module)
        return own.forward(module, states)  # type: ignore[no-any-return]
    product = nn.functional.linear(states.flatten(1), module.weight.flatten(1), module.bias)
    return product[(..., *[None] * len(module.kernel_size))]


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def _with_time(grid: Tensor) -> Tensor:
    """[1, 3]: transformers counts an image as a video of one frame."""
    return torch.cat([torch.ones(1, dtype=torch.int64), grid])[None]


def _places(grid: Tensor, count: Any) -> Tensor:
    """[1, count, 2]: column and row of patches that follow one another in rows."""
    index = torch.arange(count)
    return torch.stack([index % grid[1], index // grid[1]], -1)[None]


def places_of_patches(grid: Tensor, count: Any, merge: int) -> tuple[Tensor, Tensor]:
    """Row and column, [count] each, of patches in squares of `merge`, which follow one another in
    rows."""
    index = torch.arange(count)
    across = grid[1] // merge
    square = index // merge**2
    return (
        square // across * merge + index // merge % merge,
        square % across * merge + index % merge,
    )


def resampled(tower: Any, row: Tensor, column: Tensor, grid: Tensor) -> dict[str, Tensor]:
    """Which of the learned positions each patch takes, and how much of each. row, column: [A]."""
    from transformers.vision_utils import _interpolation_axis_taps_weights as taps_and_weights

    side = tower.num_grid_per_side
    kind = (tower.interpolation_mode, tower.interpolation_align_corners)
    down, of_row = taps_and_weights(row, grid[0], side, *kind)
    across, of_column = taps_and_weights(column, grid[1], side, *kind)
    return {
        "interp_indices": (down[:, :, None] * side + across[:, None]).flatten(1),
        "interp_weights": (of_row[:, :, None] * of_column[:, None]).flatten(1),
    }


@dataclass(frozen=True, slots=True)
class Windows:
    """Which patch is at which place of which window; it is passed in place of the lengths of the
    windows.

    Attributes:
        patches: [windows, places], the patch at each place of each window; any patch at an empty
            place.
        held: [windows, places], whether the place has a patch.
        places: [A], the place of each patch among the places of all windows.
    """

    patches: Tensor
    held: Tensor
    places: Tensor


def windows_of(row: Tensor, column: Tensor, grid: Tensor, side: int, merge: int) -> Windows:
    """Qwen2.5-VL's windows of an image, `side` patches high and wide, and smaller at the lower and
    right edges.

    row and column are [A], the place of each patch.
    """
    across = (grid[1] + side - 1) // side
    count: Any = ((grid[0] + side - 1) // side * across).item()
    place = torch.arange(side**2)
    window = torch.arange(count)[:, None]
    down = window // across * side + place // side
    right = window % across * side + place % side
    held = (down < grid[0]) & (right < grid[1])
    block = down // merge * (grid[1] // merge) + right // merge
    patches = torch.where(held, (block * merge + down % merge) * merge + right % merge, 0)
    places = (row // side * across + column // side) * side**2 + row % side * side + column % side
    return Windows(patches, held, places)
