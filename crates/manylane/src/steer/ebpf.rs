//! Steering by eBPF: loads `bpf/steer.bpf.c`, fills its maps, and attaches it to the group.
//!
//! The group forms when the second lane binds. Before that, the program cannot be attached and the
//! array does not accept the socket, so the first lane waits in `first_socket`.

use std::error::Error as StdError;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use aya::maps::{Array, Map, MapData, PerCpuArray, ReusePortSockArray};
use aya::programs::SkReuseport;
use aya::{Ebpf, EbpfLoader};
use manylane_bpf::abi;
use manylane_sys::errno::{EACCES, EMFILE, ENFILE, ENOMEM, EPERM};
use manylane_sys::map::SharedWords;

use super::policy::{Slot, Steering};
use super::table::Layout;
use crate::bpf_load::load_with_retry;
use crate::error::{Error, ErrorKind, Result, errno_of};

/// The steering table as a value of an array map: `abi::Table` as words.
type TableWords = [u32; size_of::<abi::Table>() / 4];

/// The loaded program and its maps. The kernel frees them with this value and the sockets of the
/// group.
pub(super) struct EbpfSteer {
    program: Ebpf,
    lanes: ReusePortSockArray<MapData>,
    table: Array<MapData, TableWords>,
    steered: PerCpuArray<MapData, u64>,
    counts: PerCpuArray<MapData, u64>,
    load: Option<Arc<SharedWords>>,
    /// Slots with a socket.
    filled_slots: Vec<Slot>,
    /// The first lane, while it is the only one.
    first_socket: Option<(Slot, OwnedFd)>,
    attached: bool,
}

/// The error of an eBPF step, with the kind for its number.
fn bpf_error<E: StdError + Send + Sync + 'static>(what: &str, err: E) -> Error {
    let code = errno_of(&err);
    // Out of descriptors, aya continues without one for the object's types, and fails later with
    // another error.
    if let Err(err) = std::fs::File::open("/dev/null")
        && matches!(err.raw_os_error(), Some(EMFILE | ENFILE))
    {
        return Error::system(what, err);
    }
    let kind = match code {
        Some(number @ (EMFILE | ENFILE | ENOMEM)) => {
            return Error::system(what, std::io::Error::from_raw_os_error(number));
        }
        Some(EPERM | EACCES) => ErrorKind::Permission,
        _ => ErrorKind::Unsupported,
    };
    Error::with(kind, format!("{what}: steering by eBPF needs CAP_BPF and Linux 5.12"), err)
}

/// Loads the program and unloads it, for [`probe`](fn@crate::probe).
pub(crate) fn try_load() -> Result<()> {
    EbpfSteer::load(Steering::Flow).map(|_| ())
}

impl EbpfSteer {
    /// Loads the program for one policy.
    pub(super) fn load(policy: Steering) -> Result<Self> {
        let (offset, len) = match policy {
            Steering::Key { offset, len } => (u32::from(offset), u32::from(len)),
            _ => (0, 0),
        };
        let number = policy.number();
        let mut program = EbpfLoader::new()
            // The program has no relocations against the kernel's types, and parsing those takes
            // long.
            .btf(None)
            .override_global("ml_policy", &number, true)
            .override_global("ml_key_offset", &offset, true)
            .override_global("ml_key_len", &len, true)
            .load(manylane_bpf::STEER)
            .map_err(|err| bpf_error("cannot create the eBPF maps for steering", err))?;
        // Before the maps are moved out of the object: loading writes their descriptors into the
        // program.
        let steering = steer_program(&mut program)?;
        load_with_retry(|| steering.load())
            .map_err(|err| bpf_error("cannot load the eBPF program for steering", err))?;
        let mut map = |name: &str| -> Result<Map> {
            let missing = || Error::new(ErrorKind::Unsupported, format!("the eBPF object has no map {name}"));
            program.take_map(name).ok_or_else(missing)
        };
        let wrong = |err| bpf_error("unexpected type of an eBPF map for steering", err);
        let lanes = ReusePortSockArray::try_from(map("ml_lanes")?).map_err(wrong)?;
        let table = Array::try_from(map("ml_table")?).map_err(wrong)?;
        let steered = PerCpuArray::try_from(map("ml_steered")?).map_err(wrong)?;
        let counts = PerCpuArray::try_from(map("ml_counts")?).map_err(wrong)?;
        let load = match (policy, map("ml_load")?) {
            (Steering::LeastLoaded, Map::Array(data)) => {
                let words = abi::LANES_MAX * abi::LOAD_WORDS;
                let mapped = SharedWords::new(data.fd().as_fd(), words);
                Some(Arc::new(mapped.map_err(|err| bpf_error("cannot map the load of lanes", err))?))
            }
            _ => None,
        };
        Ok(Self {
            program,
            lanes,
            table,
            steered,
            counts,
            load,
            filled_slots: Vec::new(),
            first_socket: None,
            attached: false,
        })
    }

    /// Puts the socket of a lane into its slot.
    pub(super) fn insert_socket(&mut self, slot: Slot, fd: BorrowedFd<'_>) -> Result<()> {
        if let Some((slot, first)) = self.first_socket.take() {
            self.set(slot, first.as_fd())?;
        }
        if let Some(load) = &self.load {
            // The queue of a new lane is empty.
            let base = slot as usize * abi::LOAD_WORDS;
            load.store(base + abi::LOAD_RECEIVED, load.load(base + abi::LOAD_STEERED));
        }
        match self.set(slot, fd) {
            Err(_) if !self.attached => {
                let fd = fd
                    .try_clone_to_owned()
                    .map_err(|err| Error::system("duplicating the first lane's socket", err))?;
                self.first_socket = Some((slot, fd));
                Ok(())
            }
            done => done,
        }
    }

    fn set(&mut self, slot: Slot, fd: BorrowedFd<'_>) -> Result<()> {
        if self.filled_slots.contains(&slot) {
            // A parked socket that is used again: it never left its slot.
            return Ok(());
        }
        let set = self.lanes.set(slot, &fd.as_raw_fd(), 0).map(|()| self.filled_slots.push(slot));
        set.map_err(|err| bpf_error("cannot add a lane's socket to the steering map", err))
    }

    pub(super) fn write_table(&mut self, layout: &Layout) -> Result<()> {
        let table = layout.table();
        let mut words: TableWords = [0; size_of::<abi::Table>() / 4];
        words[0] = table.size;
        words[1..=abi::TABLE_SIZE].copy_from_slice(&table.lane);
        if layout.lanes() > 1 || self.first_socket.as_ref().is_some_and(|(slot, _)| layout.entry(0) != *slot)
        {
            self.first_socket = None;
        }
        self.table.set(0, words, 0).map_err(|err| bpf_error("cannot write the steering table", err))
    }

    /// Attaches the program to the group of `fd`, once the group exists.
    pub(super) fn attach(&mut self, fd: BorrowedFd<'_>, lanes: usize) -> Result<()> {
        if self.attached || self.first_socket.is_some() {
            return Ok(());
        }
        match steer_program(&mut self.program)?.attach(fd) {
            Ok(()) => self.attached = true,
            Err(_) if lanes == 1 => {}
            Err(err) => return Err(bpf_error("cannot attach the eBPF program for steering", err)),
        }
        Ok(())
    }

    /// Drops the first socket, if there never was a second lane.
    pub(super) fn close(&mut self) {
        self.first_socket = None;
    }

    pub(super) fn load_words(&self) -> Option<Arc<SharedWords>> {
        self.load.clone()
    }

    pub(super) fn steered(&self, slot: Slot) -> Option<u64> {
        self.attached.then(|| sum(&self.steered, slot)).flatten()
    }

    pub(super) fn fallbacks(&self) -> (u64, u64) {
        let count = |index| sum(&self.counts, index).unwrap_or(0);
        (count(abi::STEER_SHORT), count(abi::STEER_KERNEL))
    }
}

fn sum(map: &PerCpuArray<MapData, u64>, index: u32) -> Option<u64> {
    Some(map.get(&index, 0).ok()?.iter().sum())
}

fn steer_program(object: &mut Ebpf) -> Result<&mut SkReuseport> {
    let program = object.program_mut("ml_steer").and_then(|program| program.try_into().ok());
    program.ok_or_else(|| Error::new(ErrorKind::Unsupported, "the eBPF object has no program ml_steer"))
}
