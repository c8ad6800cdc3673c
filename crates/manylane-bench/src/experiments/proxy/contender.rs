//! The proxies: each a process inside of the proxy's host, with one thread on its CPU.

use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use manylane_measure::{machine, named_enum};
use manylane_sys::process;
use tempfile::TempDir;

use super::bed::{Bed, CLIENT_LINK, SERVER_LINK};
use crate::run_pinned;

/// Timeout until a proxy accepts connections.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout until it has ended in order.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// As in signal(7).
const SIGTERM: i32 = 15;
/// Where Debian has nginx's module for TCP.
const NGINX_STREAM: &str = "/usr/lib/nginx/modules/ngx_stream_module.so";

named_enum! {
    /// A proxy.
    pub enum Contender {
        /// HAProxy, mode tcp.
        HaProxy = "haproxy",
        /// nginx, module stream.
        Nginx = "nginx",
        /// `manylane proxy --stack kernel`.
        ProxyKernel = "proxy/kernel",
        /// `manylane proxy --stack xdp`.
        ProxyXdp = "proxy/xdp",
    }
}

impl Contender {
    /// Its program, if it is not this one.
    fn program(self) -> Option<&'static str> {
        match self {
            Self::HaProxy => Some("haproxy"),
            Self::Nginx => Some("nginx"),
            Self::ProxyKernel | Self::ProxyXdp => None,
        }
    }

    /// True if it can be run here.
    #[must_use]
    pub fn is_installed(self) -> bool {
        self.program().is_none_or(|program| find(program).is_some())
    }

    /// Starts it: from an address to a server. `manylane` is this program.
    pub(super) fn start(
        self,
        bed: &Bed,
        manylane: &Manylane,
        listen: SocketAddr,
        server: SocketAddr,
    ) -> Result<RunningProxy> {
        let folder = TempDir::new().context("cannot create a temporary folder")?;
        let file = folder.path().join("proxy.conf");
        let path = file.display().to_string();
        let program = match self.program() {
            Some(program) => find(program).with_context(|| format!("{program} is not installed"))?,
            None => manylane.path.clone(),
        };
        let mut command = bed.proxy().command(program)?;
        match self {
            Self::HaProxy => {
                fs::write(&file, haproxy(listen, server))?;
                command.args(["-db", "-f", &path]);
            }
            Self::Nginx => {
                fs::write(&file, nginx(folder.path(), listen, server))?;
                command.args(["-c", &path, "-e", "stderr"]);
            }
            Self::ProxyKernel | Self::ProxyXdp => self.manylane(&mut command, bed, listen, server),
        }
        if let (Self::ProxyXdp, Some(delay)) = (self, manylane.rx_coalesce) {
            command.args(["--rx-usecs", &delay.as_micros().to_string()]);
        }
        let log = fs::File::create(folder.path().join("log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        // The process has the CPUs of the thread that starts it.
        let child = run_pinned(Some(bed.proxy_cpu), || command.spawn().context("cannot start it"))?;
        let mut running = RunningProxy { child, folder };
        running.wait_until_it_listens(bed, listen).with_context(|| self.to_string())?;
        Ok(running)
    }

    fn manylane(self, command: &mut Command, bed: &Bed, listen: SocketAddr, server: SocketAddr) {
        let (listen, server) = (listen.to_string(), server.to_string());
        command.args(["proxy", "--listen", &listen, "--to", &server, "--lanes", "1"]);
        command.args(["--check-interval", "0", "--idle-timeout", "1h", "--drain-timeout", "1ms"]);
        if self == Self::ProxyKernel {
            command.args(["--stack", "kernel"]);
        } else {
            let devices = [CLIENT_LINK, SERVER_LINK].map(|link| bed.proxy().device(link)).join(",");
            command.args(["--stack", "xdp", "--interface", &devices, "--source-ports", "2048-65535"]);
        }
    }
}

/// The program `manylane`.
#[derive(Debug, Clone)]
pub struct Manylane {
    /// Its file.
    pub path: PathBuf,
    /// Delay of the lanes of `proxy/xdp` before they sleep; none: by the load.
    pub rx_coalesce: Option<Duration>,
}

/// As its documentation has it for one CPU.
fn haproxy(listen: SocketAddr, server: SocketAddr) -> String {
    format!(
        "global\n nbthread 1\ndefaults\n mode tcp\n timeout connect 5s\n timeout client 1h\n timeout server 1h\n\
         listen proxy\n bind {listen} backlog 65535\n server one {server}\n"
    )
}

fn nginx(folder: &Path, listen: SocketAddr, server: SocketAddr) -> String {
    let module = if Path::new(NGINX_STREAM).exists() {
        format!("load_module {NGINX_STREAM};\n")
    } else {
        String::new()
    };
    format!(
        "{module}daemon off;\nmaster_process off;\npid {folder}/pid;\nerror_log stderr crit;\n\
         worker_rlimit_nofile 20000;\n\
         events {{ worker_connections 19000; multi_accept on; }}\n\
         stream {{ server {{ listen {listen} backlog=65535; proxy_pass {server}; proxy_timeout 1h; }} }}\n",
        folder = folder.display()
    )
}

/// A program in the folders of `PATH`.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    let system = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    std::env::split_paths(&path).chain(system).map(|folder| folder.join(program)).find(|file| file.is_file())
}

/// A proxy, until it is dropped.
pub(super) struct RunningProxy {
    child: Child,
    folder: TempDir,
}

impl RunningProxy {
    fn wait_until_it_listens(&mut self, bed: &Bed, listen: SocketAddr) -> Result<()> {
        let start = Instant::now();
        let connect = || std::net::TcpStream::connect_timeout(&listen, Duration::from_millis(100));
        while bed.clients().run(|| connect().is_err()) {
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            if let Some(status) = self.child.try_wait()? {
                bail!("ended with {status}: {}", log().trim());
            }
            ensure!(start.elapsed() < START_TIMEOUT, "does not accept connections: {}", log().trim());
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Its process.
    pub(super) fn process(&self) -> u32 {
        self.child.id()
    }

    /// Its resident memory in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        machine::read_kib(&format!("/proc/{}/status", self.child.id()), "VmRSS") * 1024
    }
}

impl Drop for RunningProxy {
    fn drop(&mut self) {
        // In order at first: ports that it has reserved in its network namespace would stay so, and
        // the next proxy would have none.
        _ = process::send_signal(self.child.id().cast_signed(), SIGTERM);
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < STOP_TIMEOUT {
            thread::sleep(Duration::from_millis(5));
        }
        // It may have ended.
        _ = self.child.kill();
        _ = self.child.wait();
    }
}
