//! The environment of a server: a network namespace and a folder.

use std::fs::Permissions;
use std::net::{SocketAddr, UdpSocket};
use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicU16;
use std::sync::atomic::Ordering::Relaxed;
use std::{fs, thread};

use manylane_sys::netns::NetNs;
use manylane_test_support::wait_for;
use manylane_testbed::{Host, topology};
use tempfile::TempDir;

/// Below the ports that the kernel gives by default (net.ipv4.ip_local_port_range).
const SERVER_PORTS: RangeInclusive<u16> = 20_000..=31_999;

/// A folder, and a network namespace with nothing but loopback if one can be created.
pub(crate) struct Sandbox {
    namespace: Option<NetNs>,
    folder: PathBuf,
    /// The library that programs in the sandbox load, if it is not the one that cargo built.
    library: Option<PathBuf>,
    /// Removes the folder on drop, unless it is a folder of the build.
    _temporary: Option<TempDir>,
}

impl Sandbox {
    /// A sandbox for the test `test`.
    pub(crate) fn new(test: &str) -> Self {
        Self::within(test, topology::available().is_ok().then(|| NetNs::create().unwrap()))
    }

    /// A sandbox on a host of a testbed.
    pub(crate) fn at(test: &str, host: &Host) -> Self {
        Self::within(test, Some(NetNs::open(&host.namespace().path()).unwrap()))
    }

    /// A sandbox on a host of a testbed, for programs of other users. Its folder, with a copy of
    /// the library, is outside the checkout, which only root may be able to read.
    pub(crate) fn for_other_users(host: &Host) -> Self {
        let temporary = tempfile::Builder::new().prefix("manylane-servers-").tempdir().unwrap();
        fs::set_permissions(&temporary, Permissions::from_mode(0o755)).unwrap();
        let mut shell = Command::new(env!("CARGO_BIN_EXE_manylane"));
        shell.args(["run", "--quiet", "--", "sh", "-c", "echo $LD_PRELOAD"]);
        let built = crate::run_ok(shell);
        let library = temporary.path().join("libmanylane_preload.so");
        fs::copy(built.trim_end().rsplit(':').next().unwrap(), &library).unwrap();
        Self {
            namespace: Some(NetNs::open(&host.namespace().path()).unwrap()),
            folder: temporary.path().to_owned(),
            library: Some(library),
            _temporary: Some(temporary),
        }
        .with_loopback()
    }

    fn within(test: &str, namespace: Option<NetNs>) -> Self {
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("servers").join(test);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        Self { namespace, folder, library: None, _temporary: None }.with_loopback()
    }

    fn with_loopback(self) -> Self {
        if self.namespace.is_some() {
            let mut ip = self.command("ip");
            ip.args(["link", "set", "lo", "up"]);
            crate::run_ok(ip);
        }
        self
    }

    /// The sandbox's folder, empty at first except for the library.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Builds a program there from files in C of this folder, and returns its path.
    pub(crate) fn compile(&self, program: &str, files: &[&str]) -> String {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let (sources, program) = (folder.join("tests/servers"), self.path(program));
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-Werror", "-pthread", "-o", &program, "-I"]);
        cc.arg(folder.join("../../abi"));
        cc.args(files.iter().map(|file| sources.join(file)));
        crate::run_ok(cc);
        program
    }

    /// Writes a file there and returns its path.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        let path = self.folder.join(name);
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Writes a file there, with what stands for each of the words between two @ in `text`, and
    /// returns its path.
    pub(crate) fn filled(&self, name: &str, text: &str, words: &[(&str, &str)]) -> String {
        let at = ("FOLDER", self.folder.to_str().unwrap());
        let fill = |text: String, (word, with): &(&str, &str)| text.replace(&format!("@{word}@"), with);
        let text = words.iter().chain([&at]).fold(text.to_owned(), fill);
        self.file(name, &text)
    }

    /// A path there.
    pub(crate) fn path(&self, name: &str) -> String {
        self.folder.join(name).to_str().unwrap().to_owned()
    }

    /// A command that runs there.
    pub(crate) fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        if let Some(namespace) = &self.namespace {
            namespace.enter_in_child(&mut command).unwrap();
        }
        if let Some(library) = &self.library {
            command.env("MANYLANE_PRELOAD", library);
        }
        command
    }

    /// A socket there, on loopback, on a port that was free.
    pub(crate) fn socket(&self) -> UdpSocket {
        self.socket_at("127.0.0.1:0")
    }

    /// A socket there.
    pub(crate) fn socket_at(&self, at: &str) -> UdpSocket {
        self.inside(|| UdpSocket::bind(at).unwrap())
    }

    /// Calls `call` by a thread that is in the network namespace.
    fn inside<T: Send>(&self, call: impl FnOnce() -> T + Send) -> T {
        let Some(namespace) = &self.namespace else {
            return call();
        };
        thread::scope(|scope| {
            let inside = scope.spawn(|| {
                namespace.enter().unwrap();
                call()
            });
            inside.join().unwrap()
        })
    }

    /// An address that is free, for UDP and probably for TCP, that no other test of this process
    /// uses. A port that the kernel gave would be one that it may give again before the server
    /// starts: a client with it gets its own requests.
    pub(crate) fn free_addr(&self) -> SocketAddr {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        loop {
            let port = *SERVER_PORTS.start() + NEXT.fetch_add(1, Relaxed) % SERVER_PORTS.len() as u16;
            let addr = SocketAddr::from(([127, 0, 0, 1], port));
            if self.inside(|| UdpSocket::bind(addr)).is_err() {
                continue;
            }
            // A program that another test is starting has a copy of the socket for a while.
            let bound = || self.inside(|| fs::read_to_string("/proc/thread-self/net/udp").unwrap());
            let port = format!(":{port:04X}");
            let is_port = |line: &str| line.split_whitespace().nth(1).is_some_and(|at| at.ends_with(&port));
            wait_for("a free port", bound, |text| !text.lines().any(is_port));
            return addr;
        }
    }
}
