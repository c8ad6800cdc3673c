# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts that run something in a virtual machine.
#
# The machine has the files of this one: virtio-fs shows it the root of the host, and what it writes
# goes to a layer in its memory. So every program, library and test is where it is here. Only
# "$folder/out" is the host's own, to be written. The first process is init.sh, which becomes the
# script that boot() is given; that one's input and output are a serial line, which the host reads
# and answers. The console of machine NAME is in "$folder/NAME.console", and what qemu says in
# "$folder/NAME.log".

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../../scripts/lib.sh"
# shellcheck source=tests/vm/apt.sh
. "$(dirname "${BASH_SOURCE[0]}")/apt.sh"

# Sets qemu, the emulator with options for its own files. Before 8.1, a kernel that patches its code
# while another CPU runs it crashes now and then, Linux 6.12 within minutes. The kernels that are
# built here do not patch theirs, and have only run with 7.2: with 10.0, programs on them find pages
# as they are in the file, where they have changed them. Why is not known.
use_qemu() {
  local apt=$root/target/vm/qemu/apt files=$root/target/vm/qemu/root version package packages
  version=$(qemu-system-x86_64 --version | sed -n 's/.* version \([0-9]*\.[0-9]*\).*/\1/p')
  qemu=(qemu-system-x86_64)
  [ -n "$kernel_modules" ] || return 0
  ! printf '8.1\n%s\n' "$version" | sort -C -V || return 0
  if [ ! -d "$files" ]; then
    rm -rf "$files.new"
    list_packages bookworm-backports "$apt"
    download "$apt" qemu-system-{x86,data} seabios
    packages=("$apt"/*.deb)
    for package in "${packages[@]}"; do
      dpkg-deb -x "$package" "$files.new"
    done
    rm "${packages[@]}"
    mv "$files.new" "$files"
  fi
  qemu=("$files/usr/bin/qemu-system-x86_64" -L "$files/usr/share/qemu" -L "$files/usr/share/seabios")
}

# Sets folder, kernel_image and kernel_modules (a folder named like the kernel's release, or empty).
use_kernel() { # VERSION: of Debian's kernel for clouds, or VERSION-full: with drivers of hardware; or a flavour
  local suite package=linux-image-cloud-amd64
  folder=$root/target/vm/$1
  case ${1%-full} in
  5.10) suite=bullseye ;;
  6.1) suite=bookworm ;;
  6.12) suite=trixie ;;
  lock-stat | debug) # built from source, without modules
    "$root/tests/vm/kernel.sh" "$1"
    kernel_image=$folder/linux/arch/x86/boot/bzImage
    kernel_modules=
    pack_initramfs
    return
    ;;
  *) die "KERNEL=$1: expected 5.10, 6.1, 6.12, lock-stat or debug" ;;
  esac
  case $1 in *-full) package=linux-image-amd64 ;; esac
  [ -d "$folder/modules" ] || fetch_kernel "$suite" "$package"
  kernel_image=$(echo "$folder"/image/boot/vmlinuz-*)
  kernel_modules=$(echo "$folder"/modules/lib/modules/*)
  pack_initramfs
}

# Debian's kernel of another release.
fetch_kernel() { # SUITE PACKAGE
  local apt=$folder/apt image modules
  rm -rf "$folder/image" "$folder/modules"*
  list_packages "$1" "$apt"
  image=$(depends "$apt" "$2" | sed -n '/^linux-image-/p')
  [ -n "$image" ] || die "$1 has no $2"
  download "$apt" "$image"
  dpkg-deb -x "$apt/$image"_*.deb "$folder/image"
  rm -f "$apt"/*.deb
  # Under another name first: its end is what use_kernel() looks for.
  mkdir -p "$folder/modules.new/lib/modules"
  modules=$(find "$folder/image" -path '*/lib/modules/*' -prune)
  mv "$modules" "$folder/modules.new/lib/modules/"
  # busybox loads no compressed ones.
  find "$folder/modules.new" -name '*.xz' -exec busybox unxz {} +
  busybox depmod -b "$folder/modules.new" "${modules##*/}"
  mv "$folder/modules.new" "$folder/modules"
}

# Builds the module of kernel/ against the headers of a kernel, or its tree: "$folder/module".
build_module() { # HEADERS VARIABLE=VALUE...: of its Makefile
  local headers=$1
  shift
  # A copy, so that what is built for one kernel is not taken for what is built for another. Without
  # type information of the kernel, which would have to be that of the running one.
  rm -rf "$folder/module"
  cp -r "$root/kernel" "$folder/module"
  make -C "$folder/module" KDIR="$headers" CONFIG_DEBUG_INFO_BTF_MODULES= "$@" modules >"$folder/module.log" 2>&1 ||
    die "the module was not built: $folder/module.log"
  ! grep -E "warning:|WARNING:" "$folder/module.log" || die "the module was built with warnings: $folder/module.log"
  strip --strip-debug "$folder/module/manylane.ko"
}

# What the kernel needs until it has the files of the host.
pack_initramfs() {
  local tree=$folder/initramfs.d name file files
  rm -rf "$tree"
  mkdir -p "$tree"/{bin,proc,sys,dev,host,layer,new} "$tree/lib/modules"
  install "$(command -v busybox)" "$tree/bin/busybox"
  install "$root/tests/vm/init.sh" "$tree/init"
  if [ -n "$kernel_modules" ]; then
    mkdir "$tree/lib/modules/${kernel_modules##*/}"
    for name in virtio_pci virtiofs overlay; do
      # Its line in modules.dep: itself, a colon, what it needs. One that is built in has none.
      read -ra files < <(sed -n "s,^\(.*/$name\.ko\):,\1,p" "$kernel_modules/modules.dep") || true
      for file in "${files[@]}"; do
        install -D "$kernel_modules/$file" "$tree/lib/modules/${kernel_modules##*/}/$file"
      done
    done
    cp "$kernel_modules"/modules.{dep,builtin} "$tree/lib/modules/${kernel_modules##*/}/"
  fi
  (cd "$tree" && find . | busybox cpio -o -H newc) >"$folder/initramfs" 2>"$folder/cpio.log"
  rm -rf "$tree"
}

# The network between machines: bridges in a namespace of its own. Before "inside" is used.
make_network() { # BRIDGE...
  local bridge
  namespace=manylane-vm-$$
  inside=(ip netns exec "$namespace")
  ip netns add "$namespace"
  for bridge in "$@"; do
    ip -n "$namespace" link add "$bridge" type bridge stp_state 0 mcast_snooping 0
    ip -n "$namespace" link set "$bridge" up
  done
}

# Options of qemu for a device behind which is a bridge: sets "device".
add_device() { # NAME BRIDGE MODEL MAC QUEUES [OPTION...]: of the model, each with a comma in front
  local name=$1 bridge=$2 model=$3 mac=$4 queues=$5 more=,romfile= kind=()
  shift 5
  if [ "$queues" -gt 1 ]; then
    kind=(multi_queue)
    more+=,mq=on,vectors=$((2 * queues + 2))
  fi
  ip -n "$namespace" tuntap add dev "$name" mode tap "${kind[@]}" vnet_hdr
  # An emulated machine takes frames late: a burst has to wait for it.
  ip -n "$namespace" link set "$name" master "$bridge" txqueuelen 8192 up
  # shellcheck disable=SC2034 # by the caller
  device=(-netdev "tap,id=$name,ifname=$name,script=no,downscript=no,vhost=off,queues=$queues"
    -device "$model,netdev=$name,mac=$mac$more$*")
}

# The machines, by their names: their processes, and the ends of the host of their serial lines.
declare -A machines=() to=() from=()
declare -a files_daemons=() inside=()

# Starts a machine.
boot() { # NAME CPUS MEMORY SECONDS SCRIPT VARIABLE=VALUE... -- OPTION...: of qemu
  local name=$1 cpus=$2 memory=$3 limit=$4 script=$5 input output
  shift 5
  use_qemu
  mkdir -p "$folder/out"
  {
    printf 'vm_out=%q vm_script=%q vm_modules=%q\n' "$folder/out" "$script" "$kernel_modules"
    echo "export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root"
    while [ $# -gt 0 ] && [ "$1" != -- ]; do
      printf 'export %q\n' "$1"
      shift
    done
  } >"$folder/$name.environment"
  shift
  share_files "$folder/$name.files"
  input=$folder/$name.in output=$folder/$name.out
  rm -f "$input" "$output"
  mkfifo "$input" "$output"
  "${inside[@]}" nice -n 5 timeout --foreground --kill-after=5 "$limit" "${qemu[@]}" \
    -accel tcg,thread=multi -cpu max -smp "$cpus" -m "$memory" -nodefaults -no-user-config -display none -no-reboot \
    -object "memory-backend-memfd,id=memory,size=$memory,share=on" -machine q35,memory-backend=memory \
    -kernel "$kernel_image" -initrd "$folder/initramfs" \
    -append "console=ttyS0 no_timer_check panic=-1 quiet ${kernel_options:-} vm_environment=\"$folder/$name.environment\"" \
    -serial "file:$folder/$name.console" -serial stdio \
    -chardev "socket,id=files,path=$folder/$name.files" -device vhost-user-fs-pci,chardev=files,tag=host \
    "$@" <"$input" >"$output" 2>"$folder/$name.log" &
  machines[$name]=$!
  exec {input}>"$input" {output}<"$output"
  to[$name]=$input from[$name]=$output
}

# Shows the files of this machine at a socket.
share_files() { # SOCKET
  local daemon
  for daemon in /usr/libexec/virtiofsd /usr/lib/qemu/virtiofsd; do
    [ ! -x "$daemon" ] || break
  done
  rm -f "$1"
  "$daemon" --socket-path="$1" -o source=/,sandbox=chroot,cache=always >"$1.log" 2>&1 &
  files_daemons+=($!)
  while [ ! -S "$1" ]; do
    kill -0 $! 2>/dev/null || die "the files of this machine cannot be shown: $1.log"
    sleep 0.05
  done
}

# To be called when a script ends, in whatever way.
end_machines() {
  local name fd
  for name in "${!machines[@]}"; do
    kill "${machines[$name]}" 2>/dev/null || true
  done
  # Only then the files, or a machine complains.
  [ ${#machines[@]} -eq 0 ] || wait "${machines[@]}" 2>/dev/null || true
  [ ${#files_daemons[@]} -eq 0 ] || kill "${files_daemons[@]}" 2>/dev/null || true
  [ ${#files_daemons[@]} -eq 0 ] || wait "${files_daemons[@]}" 2>/dev/null || true
  for fd in "${to[@]}" "${from[@]}"; do
    exec {fd}>&-
  done
  machines=() files_daemons=() to=() from=()
}

# The same, and the network.
clean() {
  end_machines
  [ -z "${namespace:-}" ] || ip netns delete "$namespace" 2>/dev/null || true
  namespace='' inside=()
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
