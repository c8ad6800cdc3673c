//! Gathers facts from folders with the `/proc` and `/sys` of some machine.

use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::super::facts::{Device, Facts, Idle, Irq, Lane, Privileges};
use super::files::FileTree;
use super::{Scope, collect_files, lanes, sockets};
use crate::top::prometheus::ROWS_MAX;

/// A root, deleted with this value.
struct Root(TempDir);

impl Root {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn files(&self) -> FileTree {
        FileTree::under(self.0.path())
    }

    fn write(&self, files: &[(&str, &str)]) {
        for (path, text) in files {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    fn link(&self, path: &str, target: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        symlink(target, path).unwrap();
    }
}

fn link0(name: &str, index: u32, mac: &str) -> Device {
    Device { name: name.into(), index, mac: Some(mac.into()), up: true, ..Device::default() }
}

#[test]
fn settings_cpus_and_privileges() {
    let root = Root::new();
    root.write(&[
        ("proc/sys/kernel/osrelease", "6.12.1-server\n"),
        ("proc/uptime", "7300.25 14000.00\n"),
        ("proc/sys/net/core/rmem_max", "212992\n"),
        ("proc/sys/kernel/io_uring_disabled", "2\n"),
        ("proc/self/status", "Name:\tx\nUid:\t1000\t0\t1000\t1000\nCapEff:\t0000000000003000\n"),
        (
            "proc/self/limits",
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max locked memory         8388608              8388608              bytes     \n",
        ),
        ("sys/devices/system/cpu/online", "0-3\n"),
        ("sys/devices/system/cpu/isolated", "3\n"),
        ("sys/devices/system/cpu/cpu0/topology/thread_siblings_list", "0,2\n"),
        ("sys/devices/system/cpu/cpu1/topology/thread_siblings_list", "1\n"),
        ("sys/devices/system/cpu/cpu2/topology/thread_siblings_list", "0,2\n"),
        ("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n"),
        ("sys/devices/system/cpu/cpuidle/current_governor", "haltpoll\n"),
        ("sys/module/haltpoll/parameters/guest_halt_poll_ns", "0\n"),
        ("sys/devices/system/cpu/cpu0/power/pm_qos_resume_latency_us", "n/a\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state0/latency", "0\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state0/disable", "0\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state1/latency", "2\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state2/latency", "170\n"),
        ("sys/devices/system/cpu/cpu0/cpuidle/state2/disable", "1\n"),
        // With a single idle state there is nothing to limit.
        ("sys/devices/system/cpu/cpu1/power/pm_qos_resume_latency_us", "0\n"),
        ("sys/devices/system/node/node0/cpulist", "0-1\n"),
        ("sys/devices/system/node/node1/cpulist", "2-3\n"),
        ("proc/12/comm", "bash\n"),
        ("proc/345/comm", "irqbalance\n"),
    ]);
    let mut facts = Facts::default();
    collect_files(&root.files(), Vec::new(), &mut facts);
    assert_eq!((facts.kernel.as_str(), facts.uptime), ("6.12.1-server", Some(7300.25)));
    assert_eq!(facts.sysctl("net.core.rmem_max"), Some(212_992));
    assert_eq!(
        (facts.sysctl("kernel.io_uring_disabled"), facts.sysctl("net.core.busy_poll")),
        (Some(2), None)
    );
    assert_eq!((facts.privileges.uid, facts.privileges.memlock), (Some(0), Some(8 << 20)));
    assert_eq!(facts.privileges.has(Privileges::NET_ADMIN), Some(true));
    assert_eq!(facts.privileges.has(Privileges::BPF), Some(false));
    assert_eq!((facts.cpu.online, facts.cpu.isolated), (vec![0, 1, 2, 3], vec![3]));
    assert_eq!(
        (facts.cpu.siblings, facts.cpu.governors),
        (vec![vec![0, 2]], [(1, "powersave".into())].into())
    );
    assert_eq!((facts.cpu.idle_governor.as_deref(), facts.cpu.halt_poll_ns), (Some("haltpoll"), Some(0)));
    assert_eq!(facts.cpu.idle, [(0, Idle { latencies: vec![0, 2], limit: "n/a".into() })].into());
    assert_eq!(facts.cpu.nodes, [(0, 0), (1, 0), (2, 1), (3, 1)].into());
    assert_eq!(facts.irqbalance, Some(345));
    // Missing files are reported.
    assert!(facts.gaps.contains_key("softnet") && facts.gaps.contains_key("udp"));
}

/// A NIC with two queues, and a virtio device whose interrupts have another name.
fn devices() -> Root {
    let root = Root::new();
    root.write(&[
        (
            "proc/interrupts",
            "           CPU0       CPU1\n\
             1:          9          0   IO-APIC   1-edge      i8042\n\
             24:         0          0   PCI-MSI 1-edge      eth0-mgmt\n\
             23:         1          0   PCI-MSI 0-edge      eth0\n\
             25:        10          0   PCI-MSI 2-edge      eth0-TxRx-0\n\
             26:         0         10   PCI-MSI 3-edge      eth0-TxRx-1\n\
             27:         0         10   PCI-MSI 3-edge      eth01-TxRx-1\n\
             38:         0       2913   PCI-MSIX-0000:00:03.0   1-edge      virtio2-input.0\n\
             39:      2021          0   PCI-MSIX-0000:00:03.0   2-edge      virtio2-output.0\n\
             NMI:        0          0   Non-maskable interrupts\n",
        ),
        ("proc/irq/25/smp_affinity_list", "0-1\n"),
        ("proc/irq/25/effective_affinity_list", "0\n"),
        ("proc/irq/26/smp_affinity_list", "1\n"),
        ("proc/irq/26/effective_affinity_list", "1\n"),
        ("proc/irq/38/smp_affinity_list", "0-1\n"),
        ("proc/irq/38/effective_affinity_list", "1\n"),
        ("sys/class/net/bonding_masters", ""),
        ("sys/class/net/eth0/ifindex", "2\n"),
        ("sys/class/net/eth0/address", "02:00:00:00:00:01\n"),
        ("sys/class/net/eth0/threaded", "1\n"),
        ("sys/class/net/eth0/device/numa_node", "1\n"),
        ("sys/class/net/eth0/queues/rx-0/rps_cpus", "00000003\n"),
        ("sys/class/net/eth0/queues/rx-0/rps_flow_cnt", "0\n"),
        ("sys/class/net/eth0/queues/rx-1/rps_cpus", "0\n"),
        ("sys/class/net/eth0/queues/rx-1/rps_flow_cnt", "4096\n"),
        ("sys/class/net/eth0/queues/tx-0/xps_cpus", "2\n"),
        ("sys/class/net/eth1/ifindex", "3\n"),
        ("sys/class/net/eth1/address", "02:00:00:00:00:02\n"),
        ("sys/class/net/eth1/queues/rx-0/rps_cpus", "0\n"),
    ]);
    root.link("sys/class/net/eth1/device", "../../../virtio2");
    root
}

#[test]
fn queues_and_interrupts_of_devices() {
    let root = devices();
    let mut facts = Facts::default();
    let links = vec![link0("eth0", 2, "02:00:00:00:00:01"), link0("eth1", 3, "02:00:00:00:00:02")];
    collect_files(&root.files(), links, &mut facts);
    assert!(!facts.gaps.contains_key("sysfs"));
    let [eth0, eth1] = &facts.devices[..] else { panic!("two devices") };
    assert_eq!((&eth0.rps, &eth0.rfs), (&Some(vec![vec![0, 1], vec![]]), &Some(vec![0, 4096])));
    assert_eq!((&eth0.xps, eth0.threaded, eth0.numa), (&Some(vec![vec![1]]), Some(true), Some(1)));
    let irq = |number, name: &str, allowed: &[usize], effective| Irq {
        number,
        name: name.into(),
        allowed: allowed.into(),
        effective: vec![effective],
    };
    assert_eq!(eth0.irqs, [irq(25, "eth0-TxRx-0", &[0, 1], 0), irq(26, "eth0-TxRx-1", &[1], 1)]);
    assert_eq!(eth1.irqs, [irq(38, "virtio2-input.0", &[0, 1], 1)]);
    assert_eq!((&eth1.rps, &eth1.xps, eth1.threaded, eth1.numa), (&Some(vec![vec![]]), &None, None, None));
}

#[test]
fn devices_of_another_namespace_are_ignored() {
    let root = devices();
    for links in [
        // Another address; another index; a device that does not exist; one too few.
        vec![link0("eth0", 2, "02:00:00:00:00:09"), link0("eth1", 3, "02:00:00:00:00:02")],
        vec![link0("eth0", 5, "02:00:00:00:00:01"), link0("eth1", 3, "02:00:00:00:00:02")],
        vec![link0("eth0", 2, "02:00:00:00:00:01"), link0("link0", 3, "02:00:00:00:00:02")],
        vec![link0("eth0", 2, "02:00:00:00:00:01")],
    ] {
        let mut facts = Facts::default();
        collect_files(&root.files(), links, &mut facts);
        assert!(facts.gaps.contains_key("sysfs"));
        assert!(facts.devices.iter().all(|device| device.rps.is_none() && device.irqs.is_empty()));
    }
}

/// A socket that two processes have, and one without a visible process.
fn sockets_of() -> Root {
    let root = Root::new();
    let header = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n";
    let row = |port: &str, inode: u32, drops: u32| {
        format!(
            " 1: 00000000:{port} 00000000:0000 07 00000000:00000300 00:00000000 00000000 0 0 {inode} 2 0 {drops}\n"
        )
    };
    let table = [header.to_owned(), row("0035", 501, 17), row("0045", 502, 0), row("0043", 503, 4)].concat();
    let receive = format!("{} 0x3 0x7f 0x10 0x0 0x0 0x0 0x7ffd 0x7f\n", libc_recvfrom());
    root.write(&[
        ("proc/net/udp", &table),
        ("proc/20/comm", "server\n"),
        ("proc/20/maps", "7f00-7f01 r-xp 0 0 0 /usr/lib/libc.so.6\n"),
        ("proc/20/task/20/syscall", &receive),
        ("proc/20/task/21/syscall", &receive),
        ("proc/20/task/22/syscall", "running\n"),
        ("proc/30/comm", "server\n"),
        ("proc/30/maps", "7f00-7f01 r-xp 0 0 0 /usr/lib/manylane/libmanylane_preload.so\n"),
        ("proc/30/task/30/syscall", "7 0x3 0x1 0x0 0x0 0x0 0x0 0x0 0x0\n"),
        ("proc/40/comm", "other\n"),
        // It ends while it is read.
        ("proc/50/comm", "ended\n"),
    ]);
    root.link("proc/20/fd/3", "socket:[501]");
    root.link("proc/20/fd/4", "socket:[502]");
    root.link("proc/20/fd/0", "/dev/null");
    root.link("proc/20/exe", "/bin/sh");
    root.link("proc/30/fd/3", "socket:[501]");
    root.link("proc/30/exe", "/no/such/program");
    root.link("proc/40/fd/3", "socket:[999]");
    root
}

/// Number of recvfrom(2), found by what it is taken for.
fn libc_recvfrom() -> i64 {
    use manylane_sys::process::{BlockedOn, parse_blocked_on};
    let is = |number: &i64| parse_blocked_on(&format!("{number} 0x3 0x0")) == Some(BlockedOn::Receive(3));
    (0..1024).find(is).unwrap()
}

#[test]
fn sockets_and_their_owners_are_found() {
    let root = sockets_of();
    let facts_of = |asked| {
        let mut facts = Facts::default();
        sockets::collect(&root.files(), asked, &mut facts);
        facts
    };
    let facts = facts_of(Scope::default());
    assert_eq!(
        facts.sockets.iter().map(|socket| (socket.inode, socket.drops)).collect::<Vec<_>>(),
        [(501, 17), (502, 0), (503, 4)]
    );
    let [server, successor] = &facts.programs[..] else { panic!("{:?}", facts.programs) };
    assert_eq!((server.pid, server.name.as_str(), server.threads), (20, "server", 3));
    // Sockets without losses are not reported.
    assert_eq!((&server.sockets, &server.waiting), (&vec![501], &[(501, 2)].into()));
    assert_eq!((server.on_lanes, &server.beyond), (false, &None));
    assert!(successor.on_lanes && successor.waiting.is_empty() && successor.beyond.is_some());
    assert!(!facts.gaps.contains_key("processes"));

    let facts = facts_of(Scope { pid: Some(20), port: None });
    assert_eq!(facts.sockets.iter().map(|socket| socket.inode).collect::<Vec<_>>(), [501, 502]);
    assert_eq!(facts.programs[0].sockets, [501, 502]);
    let facts = facts_of(Scope { pid: Some(20), port: Some(0x45) });
    assert_eq!(facts.sockets.iter().map(|socket| socket.inode).collect::<Vec<_>>(), [502]);
    let facts = facts_of(Scope { pid: None, port: Some(7) });
    assert!(facts.asked && facts.sockets.is_empty() && facts.programs.is_empty());
    // A process that has ended, and one that cannot be read.
    let facts = facts_of(Scope { pid: Some(77), port: None });
    assert!(facts.sockets.is_empty());
    assert_eq!(facts.gaps["processes"], "there is no process 77");
    root.write(&[("proc/60/fd", "no folder")]);
    let facts = facts_of(Scope { pid: Some(60), port: None });
    assert!(facts.gaps["processes"].starts_with("cannot see its open files: "), "{:?}", facts.gaps);
    // Advice is for those who can follow it.
    for (uid, why) in [
        (0, "cannot see the open files of 1 processes"),
        (1000, "cannot see the open files of 1 processes: run this as root"),
    ] {
        let mut facts = Facts::default();
        facts.privileges.uid = Some(uid);
        sockets::collect(&root.files(), Scope::default(), &mut facts);
        assert_eq!(facts.gaps["processes"], why);
    }
}

#[test]
fn an_epoll_waiter_waits_for_the_sockets_of_its_instance() {
    use manylane_sys::process::{BlockedOn, parse_blocked_on};
    let root = sockets_of();
    let is = |number: &i64| parse_blocked_on(&format!("{number} 0x9 0x0")) == Some(BlockedOn::Epoll(9));
    let epoll = (0..1024).find(is).unwrap();
    root.write(&[
        ("proc/20/task/22/syscall", &format!("{epoll} 0x9 0x0 0x0 0x0 0x0 0x0 0x0 0x0\n")),
        (
            "proc/20/fdinfo/9",
            "pos:\t0\nflags:\t02\ntfd:        3 events:  19 data:  3  pos:0\ntfd:        8 events: 1\n",
        ),
    ]);
    let mut facts = Facts::default();
    sockets::collect(&root.files(), Scope { pid: Some(20), port: None }, &mut facts);
    assert_eq!(facts.programs[0].waiting, [(501, 3)].into());
}

#[test]
fn report_lanes_are_those_with_threads_and_their_wait_policy() {
    let root = Root::new();
    root.write(&[
        ("proc/7/task/71/status", "Name:\techo\nCpus_allowed:\t4\nCpus_allowed_list:\t2\n"),
        ("proc/90/task/91/status", "Name:\tserver\nCpus_allowed:\tf\nCpus_allowed_list:\t0-3\n"),
    ]);
    let of_library = "manylane_waiting{socket=\"[::]:53\",engine=\"xdp\",policy=\"adaptive\"} 1\n\
         manylane_waiting{socket=\"[::]:54\",engine=\"mmsg\",policy=\"sleep\"} 1\n\
         manylane_lane_delivered_total{socket=\"[::]:53\",engine=\"xdp\",lane=\"0\"} 5\n\
         manylane_lane_thread{socket=\"[::]:53\",engine=\"xdp\",lane=\"0\"} 71\n\
         manylane_lane_thread{socket=\"[::]:54\",engine=\"mmsg\",lane=\"3\"} 72\n";
    let lane = |pid, thread, socket: &str, lane: &str, wait: Option<&str>, cpus: &[usize]| Lane {
        pid,
        thread,
        socket: socket.into(),
        lane: lane.into(),
        wait: wait.map(Into::into),
        cpus: cpus.into(),
    };
    assert_eq!(
        lanes::lanes(&root.files(), 7, of_library),
        [
            lane(7, 71, "[::]:53", "0", Some("adaptive"), &[2]),
            // Its thread has ended meanwhile.
            lane(7, 72, "[::]:54", "3", Some("sleep"), &[]),
        ]
    );
    // A program under `manylane run` has threads of its own, and its own way to wait.
    let of_launcher = "manylane_run_delivered_total{socket=\"0.0.0.0:9\",lane=\"1\",pid=\"90\",tid=\"91\"} 11\n\
         manylane_run_delivered_total{socket=\"0.0.0.0:9\",lane=\"\",pid=\"x\",tid=\"91\"} 11\n";
    assert_eq!(
        lanes::lanes(&root.files(), 8, of_launcher),
        [lane(90, 91, "0.0.0.0:9", "1", None, &[0, 1, 2, 3])]
    );
    // Rows of one family leave room for those of the other.
    let waiting = |at| format!("manylane_waiting{{socket=\"{at}\",policy=\"sleep\"}} 1\n");
    let thread = |at| format!("manylane_lane_thread{{socket=\"{at}\",lane=\"0\"}} 71\n");
    let page: String = (0..2 * ROWS_MAX).map(waiting).chain((0..2 * ROWS_MAX).map(thread)).collect();
    let found = lanes::lanes(&root.files(), 7, &page);
    assert_eq!(found.len(), ROWS_MAX);
    assert!(found.iter().all(|lane| lane.wait.is_some()));
}
