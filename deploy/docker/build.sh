#!/bin/sh
# Build the images of operator, router and worker (or of those named) as
# REGISTRY/kvasir/COMPONENT:VERSION, without a daemon and without privileged containers.
#
#   deploy/docker/build.sh [COMPONENT...]    (make images)
#   REGISTRY=registry.example.com/team       put before the names; default: localhost, not to be pushed
#   BASE=IMAGE[@DIGEST]                      what the images are built on; default: in the Dockerfiles
#                                            (its digest: buildah pull IMAGE; buildah images --digests)
#   BUILDAH_ARGS="--volume ..."              more arguments for `buildah build`
#
# Push them with `buildah push`. The worker image brings torch: several GB, minutes.
# Where no registry is reached, any Debian mirror gives a base, localhost/debian-python:
#
#   debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm root
#   tar -C root -cf root.tar . && base=$(buildah from scratch) && buildah add "$base" root.tar /
#   buildah commit "$base" localhost/debian-python
set -eu
cd "$(dirname "$0")/../.."
case ${1:-} in
    -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' deploy/docker/build.sh; exit 0 ;;
esac
command -v buildah >/dev/null || {
    echo "images: buildah is not installed; on Debian or Ubuntu: apt-get install buildah" >&2
    echo "images: or, with Docker: docker build -f deploy/docker/COMPONENT.Dockerfile -t localhost/kvasir/COMPONENT:VERSION ." >&2
    exit 1
}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
hint=
[ -n "${BASE:-}" ] || hint="; where no registry is reached, give a base image that is here: BASE=localhost/NAME (--help: how to make one)"
[ "$#" -gt 0 ] || set -- operator router worker
for component in "$@"; do
    file=deploy/docker/$component.Dockerfile
    [ -f "$file" ] || { echo "images: $component: no such component; one of operator, router, worker" >&2; exit 1; }
    image=${REGISTRY:-localhost}/kvasir/$component:$version
    echo "images: building $image" >&2
    # shellcheck disable=SC2086 - BUILDAH_ARGS is a list
    buildah build --isolation chroot --file "$file" --tag "$image" \
        ${BASE:+--build-arg "BASE=$BASE"} ${BUILDAH_ARGS:-} . || {
        echo "images: $image failed, see above$hint" >&2
        exit 1
    }
done
