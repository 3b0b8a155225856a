//! Copies this binary for a container that has another image. The product's image has no program that could.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Name of the copied binary.
const BINARY: &str = "agentloop";
/// The trusted roots, for images without any; `SSL_CERT_FILE` names the copy.
const ROOTS: (&str, &str) = ("/etc/ssl/certs/ca-certificates.crt", "ca-certificates.crt");

/// Copies this binary to a directory, and the trusted roots if this image has them. An earlier copy is replaced as a
/// whole.
pub fn install(directory: &Path) -> io::Result<()> {
    copy(Path::new("/proc/self/exe"), &directory.join(BINARY), 0o555)?;
    match copy(Path::new(ROOTS.0), &directory.join(ROOTS.1), 0o444) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        copied => copied,
    }
}

fn copy(from: &Path, to: &Path, mode: u32) -> io::Result<()> {
    let mut source = File::open(from)?;
    let unfinished = to.with_extension("new");
    let mut target = File::create(&unfinished)?;
    io::copy(&mut source, &mut target)?;
    target.set_permissions(Permissions::from_mode(mode))?;
    drop(target);
    fs::rename(unfinished, to)
}
