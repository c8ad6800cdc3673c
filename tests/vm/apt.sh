# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts that download packages of another release of Debian: by lists in a folder
# of their own, so that the sources of this machine stay as they are.

apt_options() { # FOLDER: sets "options"
  options=(-q -o "Dir::State::lists=$1/lists" -o "Dir::Cache=$1/cache" -o "Dir::Etc::sourcelist=$1/sources.list"
    -o Dir::Etc::sourceparts=/dev/null -o APT::Architecture=amd64 -o APT::Sandbox::User=root)
}

list_packages() { # SUITE FOLDER
  local options
  apt_options "$2"
  mkdir -p "$2"/lists/partial "$2"/cache/archives/partial
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${MIRROR:-http://deb.debian.org/debian} $1 main" \
    >"$2/sources.list"
  apt-get "${options[@]}" update >"$2/log" 2>&1 || die "no list of packages of $1: $2/log"
}

# The packages that one depends on, a line each.
depends() { # FOLDER PACKAGE
  local options
  apt_options "$1"
  apt-cache "${options[@]}" depends "$2" | sed -n 's/^ *Depends: \([^ ]*\).*/\1/p'
}

download() { # FOLDER PACKAGE...: into it
  local options apt=$1
  shift
  apt_options "$apt"
  (cd "$apt" && apt-get "${options[@]}" download "$@" >>log 2>&1) || die "$* was not fetched: $apt/log"
}
