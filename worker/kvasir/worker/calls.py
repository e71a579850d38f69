"""A function that one thread asks the engine thread to run, and the future of its result."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvasir.worker.sequence import BlockRangeError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """Something to do on the engine thread."""

    function: Callable[[], T]
    future: Future[T]

    def run(self) -> None:
        """A wrong block range is the caller's fault and goes back to it; all else is fatal."""
        self.future.set_running_or_notify_cancel()
        try:
            self.future.set_result(self.function())
        except BlockRangeError as error:
            self.future.set_exception(error)
        except BaseException as error:
            self.future.set_exception(error)
            raise

    def fail(self, error: BaseException) -> None:
        self.future.set_running_or_notify_cancel()
        self.future.set_exception(error)


def run_all(calls: Sequence[Call[Any]]) -> None:
    """Run calls in order; what is fatal to one of them is fatal to all later ones, and raised."""
    for i, call in enumerate(calls):
        try:
            call.run()
        except BaseException as error:
            for later in calls[i + 1 :]:
                later.fail(error)
            raise
