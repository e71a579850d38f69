#!/bin/sh
# Fail if a generated file is not what its source generates now.
set -eu
cd "$(dirname "$0")/../.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
sh deploy/dev/protos.sh "$fresh"
for file in "$fresh"/kvasir/proto/v1/*; do
    name=kvasir/proto/v1/$(basename "$file")
    cmp -s "$file" "proto/$name" || {
        echo "check: proto/$name is out of date; run: make protos" >&2
        exit 1
    }
done
.venv/bin/python -m kvasir.operator.crd "$fresh/crds"
diff -r "$fresh/crds" charts/kvasir/crds >/dev/null || {
    echo "check: charts/kvasir/crds is out of date; run: make crds" >&2
    exit 1
}
echo "generated files are up to date"
