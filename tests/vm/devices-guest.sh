#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=dash disable=SC2030,SC2031,SC2086 # checks run in subshells; lists of words
#
# Near, one of the two machines that devices.sh starts: what is checked there. The other one is far.
# The namespace 'beside' is the far end of veth pairs.

PATH=$PROGRAMS:$PATH
exec 3>&1

# check NAME COMMAND...
check() {
  name=$1
  shift
  case $name in *"$ONLY"*) ;; *) return 0 ;; esac
  # Not in a condition, where -e would not count.
  (
    set -e
    server=
    trap tidy EXIT
    "$@"
  ) >/tmp/said 2>&1
  status=$?
  if [ $status -eq 0 ]; then
    echo "PASS $name"
  elif [ $status -eq 77 ]; then
    echo "SKIP $name: $(tail -n 1 /tmp/said)"
  else
    echo "FAIL $name: $(tail -n 4 /tmp/said | tr '\r\n' '  ')"
  fi
}

tidy() {
  status=$?
  set +e
  [ -z "$server" ] || {
    kill "$server"
    wait "$server"
    [ $status -eq 77 ] || all_counts
  }
  {
    for device in upper0 bond0 p0 part0 part1; do ip link delete $device; done
    ip -n beside link delete bond0
  } 2>/dev/null
  exit $status
}

is() { # WHAT FOUND EXPECTED
  [ "$2" = "$3" ] || {
    echo "$1: found '$2', expected '$3'"
    exit 1
  }
}

soon() { # COMMAND...: until it succeeds
  tries=0
  until "$@" >/dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 400 ] || {
      echo "not within 20 seconds: $*"
      exit 1
    }
    sleep 0.05
  done
}

# What the host, and far, answer to a line of ours.
host() { ask HOST "$@"; }
far() { ask FAR "$@"; }
ask() {
  echo "$*" >&3
  IFS= read -r answer
  echo "$answer"
}

# 'manylane send' in the namespace, or by far: how many were asked, answered, answered wrongly and
# twice.
SCHEDULE="--rate 500 --flows 16 --timeout 5s"
from_beside() { # ADDRESS COUNT
  ip netns exec beside manylane send "$1" --count "$2" $SCHEDULE --expect echo --json |
    sed -n 's/.*"\(asked\|answered\|wrong\|duplicates\)": \([0-9]*\).*/\2/p' | xargs
}
from_far() { # ADDRESS COUNT EXPECTED [OPTION...]
  to=$1 count=$2 expected=$3
  shift 3
  far "$to" --count "$count" $SCHEDULE --expect "$expected" "$@"
}

serve() { # ADDRESS OPTION...: manylane echo, listening
  rm -f /tmp/*.json /tmp/*.err
  manylane echo "$@" --interval 0 --json --metrics 9100 >/tmp/echo.json 2>/tmp/echo.err </dev/null 3>&- &
  server=$!
  soon grep -qE "^(listening|manylane:|error:)" /tmp/echo.err
  grep -q ^listening /tmp/echo.err || {
    cat /tmp/echo.err
    exit 1
  }
}
stop() {
  busybox wget -q -O /tmp/metrics http://127.0.0.1:9100/metrics || rm -f /tmp/metrics
  kill "$server"
  wait "$server"
  server=

}
# What the XDP program did with the frames.
frames() { sed -n 's/^manylane_device_frames_total.*outcome="\([a-z_]*\)".* \([1-9][0-9]*\)$/\1=\2/p' /tmp/metrics; }
all_counts() {
  echo "frames:" "$(frames | xargs)"
  echo "counted:" "$(cat /tmp/*.json | sed -n '/"rows"/,$s/.*"\([a-z_]*\)": \([1-9][0-9]*\).*/\1=\2/p' | xargs)"
}
# The last count of that name is the total.
total() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" /tmp/echo.json | tail -n 1; }
counted() { # NAME=VALUE...
  for pair in "$@"; do
    [ "$(total "${pair%=*}")" = "${pair#*=}" ] || all_counts
    is "${pair%=*}" "$(total "${pair%=*}")" "${pair#*=}"
  done
}
# Behind the driver: one finished checksum in 65,535 looks partial, and goes to the kernel.
by_bypass() { # COUNT
  partial=$(frames | sed -n 's/^partial_checksum=//p')
  [ "$(($(total delivered_by_bypass) + ${partial:-0}))" = "$1" ] || all_counts
  is "delivered_by_bypass, and partial checksums" "$(($(total delivered_by_bypass) + ${partial:-0}))" "$1"
}
no_losses() { counted lost=0 kernel_dropped=0 bad_checksum=0 malformed=0 xsk_dropped=0; }

refused() { # TEXT OPTION...: by 'manylane echo', with that in its message
  text=$1
  shift
  status=0
  timeout 20 manylane echo "$@" --interval 0 >/tmp/refused 2>&1 </dev/null 3>&- || status=$?
  cat /tmp/refused
  is status $status 1
  grep -qF "$text" /tmp/refused
}

pair() { # NAME: a veth pair of two queues to the namespace, NAME at both ends
  ip link add "$1" numrxqueues 2 numtxqueues 2 type veth \
    peer name "$1" netns beside numrxqueues 2 numtxqueues 2
  ip link set "$1" up
  ip -n beside link set "$1" up
}

bond() { # MODE: a bond of two veth devices, with a bond of the same kind at the far end
  for at in "" "-n beside"; do
    ip $at link add bond0 type bond mode "$1" miimon 100
  done
  # Without parts, as while booting: it is given them later, and the program with it.
  ip link set bond0 up
  ip address add 10.1.0.1/24 dev bond0
  refused "bond0 is made of other devices (any that it is given)" 10.1.0.1:7 --engine xdp
  ip link set bond0 down
  for one in part0 part1; do
    pair $one
    for at in "" "-n beside"; do
      ip $at link set $one down
      ip $at link set $one master bond0
    done
  done
  ip link set bond0 up
  ip -n beside link set bond0 up
  ip -n beside address add 10.1.0.2/24 dev bond0
  ip netns exec beside ethtool -K bond0 tx off >/dev/null
  soon ip netns exec beside busybox ping -c 1 -W 1 10.1.0.1

  refused "bond0 is made of other devices (part0, part1)" 10.1.0.1:7 --engine xdp
  refused "part0 is a part of bond0" 10.1.0.1:7 --engine xdp --interface part0
  # Not by default either: a server's devices are chosen by the same rule.
  status=0
  manylane run --engine xdp --interface bond0 -- server 7 block 2 10.1.0.1 0 >/tmp/refused 2>&1 || status=$?
  cat /tmp/refused
  is status $status 125
  grep -qF "bond0 is made of other devices" /tmp/refused

  serve 10.1.0.1:7 --engine xdp --xdp-generic --interface bond0
  is answered "$(from_beside 10.1.0.1:7 200)" "200 200 0 0"
  stop
  counted delivered=200
  by_bypass 200
  no_losses
}

part_of() { # KIND OPTION...
  kind=$1
  shift
  pair p0
  ip link add upper0 type "$kind" "$@"
  ip link set upper0 up
  [ "$kind" = vrf ] || refused "upper0 is made of other devices (any that it is given)" 0.0.0.0:7 --engine xdp --interface upper0
  ip link set upper0 down
  ip link set p0 down
  ip link set p0 master upper0
  ip link set upper0 up
  ip link set p0 up
  refused "p0 is a part of upper0" 0.0.0.0:7 --engine xdp --interface p0
  refused "upper0 is made of other devices (p0)" 0.0.0.0:7 --engine xdp --interface upper0
}

pair_and_vrf() { # p0, with addresses, and upper0, which has no part yet
  pair p0
  ip address add 10.2.0.1/24 dev p0
  ip -n beside address add 10.2.0.2/24 dev p0
  ip link add upper0 type vrf table 10
  ip link set upper0 up
}
# A device that becomes a part of a VRF under a socket of none: the kernel would not take its
# datagrams either.
into_a_vrf() {
  pair_and_vrf
  serve 10.2.0.1:7 --engine xdp --interface p0
  is answered "$(from_beside 10.2.0.1:7 100)" "100 100 0 0"
  soon has_program p0
  ip link set p0 master upper0
  soon left_alone p0
  is "answered in the VRF" "$(from_beside 10.2.0.1:7 50)" "50 0 0 0"
  stop
  counted delivered_by_bypass=100 delivered=100
  no_losses
}
# An address of a VRF itself, over a device outside of it, for a socket outside of it: neither takes
# it.
to_a_vrf() {
  pair_and_vrf
  ip address add 10.5.0.1/32 dev upper0
  ip -n beside route add 10.5.0.1 via 10.2.0.1
  serve 0.0.0.0:7 --engine xdp --interface p0
  is answered "$(from_beside 10.2.0.1:7 100)" "100 100 0 0"
  is "answered in the VRF" "$(from_beside 10.5.0.1:7 50)" "50 0 0 0"
  stop
  counted delivered_by_bypass=100 delivered=100
  no_losses
}
has_program() { ip link show dev "$1" | grep -q xdp; }
left_alone() { ! has_program "$1"; }

vlan() {
  pair p0
  ip link add p0.5 link p0 type vlan id 5
  ip -n beside link add p0.5 link p0 type vlan id 5
  ip link set p0.5 up
  ip -n beside link set p0.5 up
  ip address add 10.3.0.1/24 dev p0.5
  ip -n beside address add 10.3.0.2/24 dev p0.5
  refused "p0.5: its driver accepts no XDP program" 10.3.0.1:7 --engine xdp
  # The tag in the frame: the VLAN's device gets it, or who names the VLAN.
  ip netns exec beside ethtool -K p0 txvlan off >/dev/null
  serve 10.3.0.1:7 --engine xdp --interface p0
  is answered "$(from_beside 10.3.0.1:7 100)" "100 100 0 0"
  stop
  counted delivered_by_bypass=0 delivered=100
  no_losses
  serve 10.3.0.1:7 --engine xdp --interface p0 --xdp-vlan 5
  is "answered with the tag" "$(from_beside 10.3.0.1:7 100)" "100 100 0 0"
  stop
  counted delivered_by_bypass=100 delivered=100
  no_losses
}

# Datagrams of VLAN 5 to an address without a tag, which are not for us: in a frame the tag is seen.
# Beside it, where the other end of a veth pair leaves it by default, only the kernel sees it
# (docs/xdp.md).
tags_beside_frames() {
  pair p0
  ip address add 10.3.0.1/24 dev p0
  ip -n beside link add p0.5 link p0 type vlan id 5
  ip -n beside link set p0.5 up
  ip -n beside address add 10.3.0.2/24 dev p0.5
  ip -n beside neighbour replace 10.3.0.1 lladdr "$(cat /sys/class/net/p0/address)" dev p0.5
  # Behind the driver, what a kernel here has not finished is left to the kernel.
  ip netns exec beside ethtool -K p0 tx off >/dev/null
  for beside in on off; do
    ip netns exec beside ethtool -K p0 txvlan $beside >/dev/null
    for options in "--engine mmsg" "--engine xdp --interface p0" "--engine xdp --xdp-generic --interface p0"; do
      case $beside$options in
      *mmsg | off*) taken=0 ;;
      *) taken=100 ;;
      esac
      echo "txvlan $beside, $options"
      serve 10.3.0.1:7 $options
      is asked "$(from_beside 10.3.0.1:7 100 | cut -d ' ' -f 1)" 100
      stop
      counted delivered=$taken delivered_by_bypass=$taken
      no_losses
    done
  done
}

tags_taken_off() {
  warning="its driver strips VLAN tags"
  ip address add 10.4.0.1/24 dev eth2
  ip link set eth2 up
  is rxvlan "$(ethtool -k eth2 | sed -n 's/^rx-vlan-offload: //p')" on
  refused "$warning" 10.4.0.1:7 --engine xdp --xdp-generic --interface eth2 --xdp-vlan 5
  serve 10.4.0.1:7 --engine xdp --xdp-generic --interface eth2
  stop
  grep -q "$warning" /tmp/echo.err
  ethtool -K eth2 rxvlan off
  serve 10.4.0.1:7 --engine xdp --xdp-generic --interface eth2 --xdp-vlan 5
  is "warnings without the offload" "$(grep -c "$warning" /tmp/echo.err)" 0
  # Seen within four seconds, and said once.
  ethtool -K eth2 rxvlan on
  soon grep -q "$warning" /tmp/echo.err
  sleep 5
  stop
  is "warnings after the change" "$(grep -c "$warning" /tmp/echo.err)" 1
  ethtool -K eth2 rxvlan off
}

# Of queues that the driver keeps to itself, a lane would get datagrams and could not answer: they
# are left to the kernel.
virtio() { # QUEUES LEFT
  ethtool -L eth0 combined "$1"
  is "partial checksums by the host before" "$(host partial near0)" on
  serve 10.77.0.2:7 --engine xdp --lanes "$1"
  is "partial checksums by the host meanwhile" "$(host partial near0)" off
  is "queues while the program is attached" "$(find /sys/class/net/eth0/queues/ -name "rx-*" | wc -l)" $(($1 + $2))
  for size in 0 64 65 512 1472; do
    is "answered of $size bytes" "$(from_far 10.77.0.2:7 500 echo --size $size)" "500 500 0 0"
  done
  stop
  counted delivered=2500 sent=2500
  no_losses
  if [ "$2" -eq 0 ]; then counted delivered_by_bypass=2500; else grep "uses the other receive queues" /tmp/echo.err; fi
  is "queues with frames for lanes" "$(ethtool -S eth0 | grep -cE 'rx_?(queue_)?[0-9]+_xdp_redirects: [1-9]')" "$1"
  is "partial checksums by the host afterwards" "$(host partial near0)" on
}

# Behind the driver frames are as the host left them: their datagrams are the kernel's.
virtio_generic() {
  serve 10.77.0.2:7 --engine xdp --xdp-generic
  is "partial checksums by the host" "$(host partial near0)" on
  is answered "$(from_far 10.77.0.2:7 500 echo)" "500 500 0 0"
  stop
  counted delivered_by_bypass=0 delivered=500
  no_losses
}

virtio_run() { # RP_FILTER: that of eth0 once the server runs
  echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
  echo 0 >/proc/sys/net/ipv4/conf/eth0/rp_filter
  rm -f /tmp/*.json
  manylane run --engine xdp --json-file /tmp/run.json -- server 7 block 2 10.77.0.2 0 >/tmp/run.err 2>&1 3>&- &
  server=$!
  (soon is_bound 0007) || lacks "this kernel does not support it"
  is "partial checksums by the host" "$(host partial near0)" off
  echo "$1" >/proc/sys/net/ipv4/conf/eth0/rp_filter
  # Seen within four seconds, and of use: eth1 has an address, too.
  [ "$1" -eq 0 ] || sleep 5
  is answered "$(from_far 10.77.0.2:7 500 text:hi! --payload text:hi)" "500 500 0 0"
  stop
  echo 0 >/proc/sys/net/ipv4/conf/eth0/rp_filter
  is delivered "$(summed delivered)" 500
  busy="creating the rings: Device or resource busy"
  if [ "$1" -eq 1 ]; then
    is "received by XDP" "$(summed delivered_by_bypass)" 0
    # Without queues, the filter decides nothing.
    ! grep -F "$busy" /tmp/run.err || exit 77
  else
    [ "$(summed delivered_by_bypass)" -gt 0 ] || lacks "$busy"
  fi
}
lacks() { # TEXT: the error of a kernel that cannot lease queues
  cat /tmp/run.err
  ! grep -F "$1" /tmp/run.err || exit 77
  exit 1
}
is_bound() { grep -q ":$1 " /proc/net/udp; }
summed() { sed -n "s/.*\"$1\": \([0-9]*\).*/\1/p" /tmp/run.json | awk '{ sum += $1 } END { print sum + 0 }'; }

# What the doctor sees of a device: its line, and whether it finds that hashes use few queues.
spread() { # DEVICE
  manylane doctor | tr '\n' ' ' | sed 's/  */ /g' >/tmp/doctor || true
  sed -n "s/.* $1: \([a-z0-9_]*, [0-9]* receive queues\?\),.* RSS to \([0-9]*\) of them.*/\1, \2/p" /tmp/doctor
  echo
  grep -o "\[rss-narrow:$1\]" /tmp/doctor || true
}
doctor_of_queues() {
  ethtool -L eth0 combined 4
  ethtool -X eth0 equal 4 2>/tmp/refused || {
    echo "virtio_net has no table of hashes: $(cat /tmp/refused)"
    exit 77
  }
  is "with all queues" "$(spread eth0)" "virtio_net, 4 receive queues, 4"
  ethtool -X eth0 equal 2
  is "with two queues" "$(spread eth0 | xargs)" "virtio_net, 4 receive queues, 2 [rss-narrow:eth0]"
  ethtool -X eth0 equal 4
}

virtio_without_offloads() {
  refused "ctrl_guest_offloads" 10.77.1.2:7 --engine xdp
  serve 10.77.1.2:7 --interface eth1
  is answered "$(from_far 10.77.1.2:7 500 echo)" "500 500 0 0"
  stop
  counted delivered_by_bypass=0 delivered=500
  no_losses
}

# A driver without XDP: native is refused, and behind it all arrives.
without_xdp() {
  refused "eth3: its driver accepts no XDP program" 10.77.3.2:7 --engine xdp --interface eth3
  serve 10.77.3.2:7 --engine xdp --xdp-generic --interface eth3
  for size in 0 64 65 512 1472; do
    is "answered of $size bytes" "$(from_far 10.77.3.2:7 500 echo --size $size)" "500 500 0 0"
  done
  stop
  counted delivered=2500 sent=2500
  by_bypass 2500
  no_losses
}

# An emulated CPU may pause for long: what goes through sockets is not to be lost by that.
echo 8388608 | tee /proc/sys/net/core/rmem_max >/proc/sys/net/core/rmem_default
for module in virtio_net vmxnet3 e1000e veth "bonding max_bonds=0" 8021q vrf team bridge; do
  busybox modprobe $module || echo "SKIP the kernel has no $module"
done
ip link set lo up
ip netns add beside
ip -n beside link set lo up
for number in 0 1; do
  ip address add 10.77.$number.2/24 dev eth$number
  ip link set eth$number up
done
# Beside eth0, on the same bridge: each answers for its own address.
echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore
ip address add 10.77.3.2/24 dev eth3
ip link set eth3 up

check "virtio_net with queues to spare for the driver" virtio 2 2
check "virtio_net with all its queues in use" virtio 4 0
check "virtio_net, generic XDP" virtio_generic
check "virtio_net, a server under manylane run" virtio_run 0
check "virtio_net, a server under manylane run, with rp_filter" virtio_run 1
check "virtio_net whose host cannot be asked to finish checksums" virtio_without_offloads
check "queues that the doctor sees" doctor_of_queues
check "e1000e, which has no XDP" without_xdp
check "bond, balance-xor" bond balance-xor
check "bond, active-backup" bond active-backup
check "part of a bridge" part_of bridge
check "part of a team" part_of team
check "part of a VRF" part_of vrf table 10
check "a device that joins a VRF" into_a_vrf
check "an address of a VRF" to_a_vrf
check "VLAN device on veth" vlan
check "tags beside frames on veth" tags_beside_frames
check "tags that the driver takes off" tags_taken_off
complaints() { dmesg | grep -E "] (BUG:|WARNING: |Call Trace|general protection)"; }
complaints && echo "FAIL the kernel complains"
echo "WARNING: to see that complaints are found" >/dev/kmsg
complaints >/dev/null || echo "FAIL complaints of the kernel are not found"
echo DONE
busybox poweroff -f
