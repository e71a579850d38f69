#!/bin/sh
# Generate the protobuf stubs into the folder given (default: beside the .proto files).
set -eu
cd "$(dirname "$0")/../.."
out=${1:-proto}
PATH="$PWD/.venv/bin:$PATH"
.venv/bin/python -m grpc_tools.protoc -I proto \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
    proto/kvasir/proto/v1/*.proto
