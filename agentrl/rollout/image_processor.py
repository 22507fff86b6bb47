"""The processor of a model that reads images, tried when it is loaded: each image alone must become what it becomes beside others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.core.errors import ConfigError
from agentrl.core.images import ImageInput, ImageTensor, PlacedImage, filled_up, positions_of
from agentrl.core.language_models import rope_index
from agentrl.core.model_shape import mutual_layers, placeholder_ids, prompt_placeholder
from agentrl.core.tokenizers import quiet_transformers
from agentrl.core.types import ints

PROBES = ((56, 56), (40, 80))
"""Width and height of the drawn images on which a processor is tried."""
TEXT_FIELDS = frozenset({"input_ids", "attention_mask"})
BETWEEN = ("", "and")
"""Texts between the images on which a processor is tried: some tokenizers join what images that touch each other begin and end with."""
VIDEOS = "video_processor"
Arrays = dict[str, npt.NDArray[Any]]


class Processor:
    """The processor of a model, tried on drawn images: it must make of each image alone what it makes of several.

    Raises:
        ConfigError: If it cannot be loaded, or images cannot be processed one by one.
    """

    def __init__(self, model: str, config: Any, *, trust_remote_code: bool = False) -> None:
        self._name, self._config = model, config
        self._placeholder, self._pixels = prompt_placeholder(config), placeholder_ids(config)[0]
        try:
            with quiet_transformers():
                self._processor: Any = load_processor(model, trust_remote_code=trust_remote_code)
        except (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, TypeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise self._refused(f"its processor cannot be loaded: {reason}") from error
        if getattr(self._processor, "image_processor", None) is None:
            raise self._refused("has no processor of images (preprocessor_config.json)")
        self._text = self._processor.tokenizer.convert_ids_to_tokens(self._placeholder)
        if (own := getattr(self._processor, "image_token", None)) not in (None, self._text):
            raise self._refused(f"its processor replaces the token {own} by an image, and its configuration names {self._text}")
        self._index = rope_index(config)
        self._mutual = bool(mutual_layers(config))
        self._tensors: dict[str, tuple[int, bool]] = {}
        self._prove()

    def process(self, image: Any, data: bytes, key: str) -> ImageInput:
        """Return an image as the model reads it."""
        ids, arrays, types = self._run([image])
        return ImageInput(
            key=key,
            data=data,
            token_ids=ints(ids),
            placeholder=self._placeholder,
            tensors={name: ImageTensor(array, *self._tensors[name]) for name, array in arrays.items()},
            positions=self._positions(ids, arrays),
            token_types=types,
        )

    def _run(self, images: Sequence[Any], between: str = "") -> tuple[list[int], Arrays, Arrays]:
        """Return the tokens of some images, their tensors, and the arguments of the model that mark the tokens, if it reads such."""
        text = between.join([self._text] * len(images))
        # Without special tokens: the one for the beginning of a text would come before each image.
        found = self._processor(text=[text], images=list(images), add_special_tokens=False, return_tensors="pt")
        marks = {name: found.pop(name)[0].numpy() for name in list(found) if name.endswith("token_type_ids")}
        if bool(marks) < self._mutual or (marks and not self._mutual and self._index is None):
            what = f"marks the tokens of images ({min(marks)})" if marks else "does not mark the tokens of images"
            raise self._refused(f"its processor {what}, and how its model attends to them is not known")
        arrays = {name: tensor.numpy() for name, tensor in found.items() if name not in TEXT_FIELDS}
        for array in arrays.values():
            # All episodes with the image share these arrays.
            array.setflags(write=False)
        return found["input_ids"][0].tolist(), arrays, marks if self._mutual else {}

    def _positions(self, ids: Sequence[int], arrays: Mapping[str, npt.NDArray[Any]]) -> npt.NDArray[np.int64] | None:
        """Return the positions of the tokens of images, as the model itself finds them; `None` if they are 0, 1, 2 and so on."""
        if self._index is None:
            return None
        import torch

        tokens = torch.tensor([ids])
        # Copies, because torch warns of arrays that may not be written.
        grids = {name: torch.from_numpy(array.copy()) for name, array in arrays.items() if name.endswith("grid_thw")}
        found, _ = self._index(input_ids=tokens, mm_token_type_ids=(tokens == self._pixels).int(), **grids)
        positions: npt.NDArray[np.int64] = found[:, 0].numpy().astype(np.int64)
        # Counted from the first, since the image may stand anywhere in a prompt.
        return positions - positions[:, :1]

    def _prove(self) -> None:
        """Find along which axes arrays of several images are joined, and that images beside each other are what they are alone."""
        images = [_drawn(*size) for size in PROBES]
        alone, together = [self._run([image]) for image in images], self._run(images)
        for name, array in together[1].items():
            parts = [arrays[name] for _, arrays, _ in alone]
            ways = ((axis, pads) for pads in (False, True) for axis in range(array.ndim if not pads else 1))
            if (way := next((way for way in ways if _same(parts, *way, array)), None)) is None:
                raise self._refused(f"its processor makes another {name} of several images than of each alone")
            self._tensors[name] = way
        one, other = (ids for ids, _, _ in alone)
        if not any(_surrounds(self._run(images, between)[0], one, other, bool(between)) for between in BETWEEN):
            raise self._refused("its processor writes other tokens for several images than for each alone")
        if self._index is not None:
            self._prove_positions([self.process(image, b"", str(number)) for number, image in enumerate(images)], together[1])

    def _prove_positions(self, images: Sequence[ImageInput], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Compare positions put together of those of images with those that the model finds for a whole prompt."""
        ids, placed, text = [0, 1], list[PlacedImage](), [2, 3, 4]
        for image in images:
            placed.append(PlacedImage(len(ids), image))
            ids += [*image.token_ids.tolist(), *text]
        whole = self._positions(ids, arrays)
        if whole is None or not np.array_equal(whole, positions_of(len(ids), placed)):
            raise self._refused("gives the tokens of an image other positions in a prompt than alone")

    def _refused(self, problem: str) -> ConfigError:
        return ConfigError("--model", self._name, problem, "Use another model, or tasks without images.")


def load_processor(model: str, *, trust_remote_code: bool = False) -> Any:
    """Return the processor of a model; where torchvision is missing, which transformers needs for videos, one that reads no videos."""
    from transformers import AutoProcessor
    from transformers.utils import is_torchvision_available

    if is_torchvision_available() or (kind := _class_with_videos(model)) is None:
        return AutoProcessor.from_pretrained(model, trust_remote_code=trust_remote_code)
    return _without_videos(kind).from_pretrained(model)


def _class_with_videos(model: str) -> Any:
    """Return the class of a model's processor if that has a part for videos; `None` for others and for code of a model's own."""
    from transformers import AutoConfig
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(model)), None)
    return kind if kind is not None and VIDEOS in kind.get_attributes() else None


def _without_videos(kind: Any) -> Any:
    """Return a class of processors with nothing in the place of the part for videos."""

    class WithoutVideos(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            # transformers looks at the class of each part, and would refuse the missing one.
            return type(None) if argument_name == VIDEOS else super().check_argument_for_proper_class(argument_name, argument)

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **kwargs: Any) -> list[Any]:
            whole = cls.get_attributes
            # By this list transformers loads the parts, and the part for videos needs torchvision.
            cls.get_attributes = classmethod(lambda _: [name for name in whole() if name != VIDEOS])
            try:
                found: list[Any] = super()._get_arguments_from_pretrained(*args, **kwargs)
            finally:
                del cls.get_attributes
            # The constructor takes its parts by their places.
            found.insert(whole().index(VIDEOS), None)
            return found

    return WithoutVideos


def _surrounds(together: Sequence[int], one: Sequence[int], other: Sequence[int], apart: bool) -> bool:
    """Return True if the tokens of two images are those of one, perhaps others where they are `apart`, and those of the other."""
    between = len(together) - len(one) - len(other)
    fits = between > 0 if apart else between == 0
    return fits and list(together[: len(one)]) == list(one) and list(together[len(one) + between :]) == list(other)


def _same(parts: Sequence[Any], axis: int, is_padded: bool, whole: Any) -> bool:
    try:
        return np.array_equal(np.concatenate(filled_up(parts, axis) if is_padded else parts, axis=axis), whole)
    except ValueError:  # of shapes that do not fit together
        return False


def _drawn(width: int, height: int) -> Any:
    from PIL import Image

    values = np.arange(width * height * 3, dtype=np.uint32) * 7 % 251
    return Image.fromarray(values.astype(np.uint8).reshape(height, width, 3))
