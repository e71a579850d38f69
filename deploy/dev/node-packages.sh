#!/bin/sh
# Install what tests on real Kubernetes nodes need besides Go (Debian, Ubuntu; as root).
# Does nothing when all of it is there.
set -eu

set -- containerd runc containernetworking-plugins iptables nftables conntrack iproute2 procps util-linux
[ "$(dpkg-query --show --showformat='${db:Status-Status}\n' "$@" 2>/dev/null | grep -cx installed)" = "$#" ] && exit 0
apt-get update --quiet=2
DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends "$@"
