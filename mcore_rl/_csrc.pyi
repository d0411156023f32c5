"""csrc/bindings.cpp. Addresses and streams are integers; bad ones raise ValueError."""

has_cuda: bool

class Table:
    def __init__(self, kind: int, boxes: int, num_boxes: int) -> None: ...
    def run(self, num_threads: int) -> None: ...
    def run_cuda(self, device: int, stream: int, on_device: int) -> None: ...
    @property
    def num_tiles(self) -> int: ...
    def words(self) -> bytes: ...

class Sums:
    def __init__(self, top: int, total: int, moment: int, chosen: int) -> None: ...

class Gradients:
    def __init__(
        self, top: int, total: int, entropy: int, of_log_probs: int, of_entropy: int
    ) -> None: ...

class LogitTile:
    def __init__(
        self,
        logits: int,
        is_bfloat16: bool,
        tokens: int,
        ids: int,
        stride: int,
        targets: int,
        first_id: int,
        scale: float,
    ) -> None: ...
    def forward(self, sums: Sums, device: int, stream: int, num_threads: int) -> None: ...
    def backward(self, of: Gradients, device: int, stream: int, num_threads: int) -> None: ...
