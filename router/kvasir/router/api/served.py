"""The served model as the API needs it: card and tokenizer, prompts to token ids.

Owns the built tokenizers (one per tokenizer hash) and the few threads on which long texts
are rendered and encoded, so that the event loop goes on meanwhile.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from kvasir.proto.errors import Reason, Refusal
from kvasir.router.api.errors import ApiError, invalid
from kvasir.router.api.schemas import ChatMessage
from kvasir.router.api.validate import check_window
from kvasir.router.config import RouterConfig
from kvasir.router.contracts import Dispatcher, ModelCard
from kvasir.router.text.chat_template import TemplateFailure
from kvasir.router.text.tokenizer import ModelTokenizer, TokenizerError

_THREADS = 4
_INLINE_CHARACTERS = 4096
"""Up to here encoding takes less than a millisecond: not worth a change of thread."""
_POLL_SECONDS = 0.05
_RETRY_AFTER = 5.0
_QUEUE_RETRY_AFTER = 1.0

Result = TypeVar("Result")
_Known = tuple[ModelCard, ModelTokenizer | ApiError]
BuildTokenizer = Callable[[Mapping[str, bytes]], ModelTokenizer]
"""From the model's tokenizer files; raises TokenizerError."""


@dataclass(frozen=True, slots=True)
class Served:
    card: ModelCard
    tokenizer: ModelTokenizer


class ServedModel:
    """Asks the dispatcher for the model when a request needs it."""

    def __init__(self, config: RouterConfig, dispatcher: Dispatcher, build: BuildTokenizer) -> None:
        self._build = build
        self._config = config
        self._dispatcher = dispatcher
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvasir-text")
        self._slots = asyncio.Semaphore(_THREADS)
        self._building = asyncio.Lock()
        self._built: tuple[str, ModelTokenizer] | None = None
        self._held = 0

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def prepare(self) -> None:
        """Build the tokenizer once there is a model, so that no request waits for it."""
        await self._first_known()

    async def resolve(self, name: str | None) -> Served | ApiError:
        """The model called ``name`` (None: whichever is served).

        Waits for a first worker for as long as the settings say, with at most as many others
        as may be in flight.
        """
        try:
            async with asyncio.timeout(self._config.no_worker_timeout):
                found = await self._known() or await self._hold()
        except TimeoutError:
            return _no_worker(self._config.no_worker_timeout)
        if isinstance(found, ApiError):
            return found
        card, tokenizer = found
        if name not in (None, card.name):
            message = f"model '{name}' is not served here; '{card.name}' is"
            return ApiError.of(Refusal(Reason.MODEL_NOT_FOUND, message, "model"))
        return tokenizer if isinstance(tokenizer, ApiError) else Served(card, tokenizer)

    async def _hold(self) -> _Known | ApiError:
        """A request waits for a first worker."""
        if self._held >= self._config.queue_limit:
            message = f"{self._held} requests wait for a worker; try again later."
            return ApiError.of(Refusal(Reason.QUEUE_FULL, message), _QUEUE_RETRY_AFTER)
        self._held += 1
        try:
            with self._dispatcher.held():
                return await self._first_known()
        finally:
            self._held -= 1

    async def _first_known(self) -> _Known:
        while True:
            if found := await self._known():
                return found
            await asyncio.sleep(_POLL_SECONDS)

    async def _known(self) -> _Known | None:
        card = self._dispatcher.model()
        tokenizer = await self._tokenizer(card) if card else None
        return (card, tokenizer) if card and tokenizer else None

    async def _tokenizer(self, card: ModelCard) -> ModelTokenizer | ApiError | None:
        if self._built and self._built[0] == card.tokenizer_hash:
            return self._built[1]
        async with self._building:
            if self._built and self._built[0] == card.tokenizer_hash:
                return self._built[1]
            files = await self._dispatcher.tokenizer_files()
            now = self._dispatcher.model()
            if files is None or now is None or now.tokenizer_hash != card.tokenizer_hash:
                return None  # none yet, or the files of a model that came in the meantime
            try:
                tokenizer = await asyncio.to_thread(self._build, files)
            except TokenizerError as error:
                return ApiError.of(Refusal(Reason.INTERNAL, str(error)))
            self._built = (card.tokenizer_hash, tokenizer)
            return tokenizer

    async def chat_ids(
        self, served: Served, messages: list[ChatMessage], *, add_special_tokens: bool = True
    ) -> list[int] | ApiError:
        """Token ids of a conversation, rendered with the model's chat template."""
        template, timeout = served.tokenizer.template, self._config.limits.template_timeout
        if template is None:
            return invalid("messages", "cannot be used: this model has no chat template")
        plain = [_plain(message) for message in messages]

        def render_and_encode() -> list[int] | ApiError:
            text = template.render(plain, timeout=timeout)
            if isinstance(text, TemplateFailure):
                return ApiError.of(Refusal(Reason.INVALID_REQUEST, text.message, "messages"))
            return _encode(served, text, "messages", add_special_tokens)

        return await self._in_thread(render_and_encode, "messages")

    async def text_ids(
        self, served: Served, text: str, *, add_special_tokens: bool = True
    ) -> list[int] | ApiError:
        """Token ids of a plain prompt."""
        if len(text) <= _INLINE_CHARACTERS:
            return _encode(served, text, "prompt", add_special_tokens)
        return await self._in_thread(
            lambda: _encode(served, text, "prompt", add_special_tokens), "prompt"
        )

    async def _in_thread(
        self, work: Callable[[], Result | ApiError], param: str
    ) -> Result | ApiError:
        """Run ``work``, within the time limit counted from when it has a thread."""
        timeout = self._config.limits.template_timeout
        loop = asyncio.get_running_loop()
        async with self._slots:
            try:
                return await asyncio.wait_for(loop.run_in_executor(self._threads, work), timeout)
            except TimeoutError:
                return invalid(param, f"took longer than {timeout:g} s to turn into tokens")


def _encode(
    served: Served, text: str, param: str, add_special_tokens: bool
) -> list[int] | ApiError:
    """Token ids of a text; one that is surely too long is refused without encoding it."""
    error = check_window(param, served.tokenizer.fewest_tokens(text), served.card)
    return error or served.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def _plain(message: ChatMessage) -> dict[str, str]:
    """What a template sees. None of them knows the newer name of the system role."""
    role = "system" if message.role == "developer" else message.role
    plain = {"role": role, "content": message.content}
    return plain | {"name": message.name} if message.name is not None else plain


def _no_worker(waited: float) -> ApiError:
    message = f"No worker of the model is ready yet (waited {waited:g} s); try again shortly."
    return ApiError.of(Refusal(Reason.NO_CAPACITY, message), _RETRY_AFTER)
