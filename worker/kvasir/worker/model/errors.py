"""The one error of loading a model."""


class ModelError(Exception):
    """The model cannot be served as configured; the message is one line for the operator.

    ``field`` names the key of WorkerConfig, or the file, at fault; ``problem`` says what is
    wrong with it, ``fix`` what to do.
    """

    def __init__(self, field: str, problem: str, fix: str) -> None:
        super().__init__(f"{field}: {problem}; {fix}")
        self.field = field
        self.problem = problem
        self.fix = fix
