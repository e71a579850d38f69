"""The parts of the autoscaler; ``kvasir.operator.scale`` puts them together. All pure."""
