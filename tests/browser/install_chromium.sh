#!/bin/sh
# Makes a Chromium available to the browser tests: on Debian and its kin as root through apt-get. Elsewhere it says what
# to do and succeeds: without one the browser tests skip with that same line, except where CI=true, which fails.
set -u
if command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1; then
    exit 0
fi
if command -v apt-get >/dev/null 2>&1 && [ "$(id -u)" = 0 ]; then
    echo "Installing Chromium for the browser tests."
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null && exit 0
fi
echo "No Chromium: the browser tests will be skipped. Install the package chromium (Debian: apt-get install chromium)."
[ "${CI:-}" != true ]
