//! Finds cuBLAS on this machine, without any path built in but the toolkit's usual one.
//!
//! What it is not: a downloader. Where there is none, it says where it looked.
//!
//! Invariant: a library is loaded once per process and never unloaded; a search that failed is not
//! tried again.
//!
//! ```text
//!   LIGHTERING_CUBLAS -> the loader's own path -> CUDA_HOME, CUDA_PATH -> /usr/local/cuda
//!     -> beside Python packages: nvidia/cu13/lib, nvidia/cublas/lib (as PyTorch's wheels bring it)
//! ```
//!
//! `blas` uses it.

use super::driver::one_line;
use libloading::Library;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Says a file or a folder where cuBLAS is; nothing else is looked at then.
pub(super) const VARIABLE: &str = "LIGHTERING_CUBLAS";
/// Newest first. Each needs the library of the same version that multiplies for it.
const NAMES: [(&str, &str); 2] =
    [("libcublas.so.13", "libcublasLt.so.13"), ("libcublas.so.12", "libcublasLt.so.12")];

/// Loads cuBLAS; the error is one line.
pub(super) fn load() -> Result<&'static Library, String> {
    let named = std::env::var_os(VARIABLE).map(PathBuf::from);
    let asked = named.is_some();
    let folders = match named {
        Some(path) => vec![path],
        None => {
            // No folder stands for the loader's own search.
            let mut folders = vec![PathBuf::new()];
            folders.extend(toolkits(|name| std::env::var_os(name).map(PathBuf::from)));
            folders.extend(packages(&python_folders()));
            folders
        }
    };
    let mut failed = Vec::new();
    for (library, helper) in folders.iter().flat_map(|folder| pairs(folder)) {
        match open(&library, &helper) {
            Ok(library) => return Ok(library),
            Err(why) => failed.push(why),
        }
    }
    let places = if asked {
        format!("in {VARIABLE} {}", folders[0].display())
    } else {
        format!("in {} folders ({VARIABLE} may name one)", folders.len())
    };
    let why = failed.into_iter().next().map(|why| format!(": {why}")).unwrap_or_default();
    Err(format!("no cuBLAS 13 or 12 {places}{why}"))
}

/// Library and helper as a folder, or a file's folder, may hold them. Files that are not there are
/// left out, so that what is tried last is what went wrong.
fn pairs(place: &Path) -> Vec<(PathBuf, PathBuf)> {
    if place.as_os_str().is_empty() {
        return NAMES.iter().map(|(name, helper)| (name.into(), helper.into())).collect();
    }
    let folder = if place.is_dir() { place } else { place.parent().unwrap_or(place) };
    let both = NAMES.iter().map(|(name, helper)| (folder.join(name), folder.join(helper)));
    let wanted = |library: &PathBuf| library.is_file() && (place.is_dir() || library == place);
    both.filter(|(library, _)| wanted(library)).collect()
}

/// Folders of CUDA's toolkit.
fn toolkits(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let named = ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| variable(name));
    named.chain([PathBuf::from("/usr/local/cuda")]).map(|home| home.join("lib64")).collect()
}

/// Folders that wheels put it into, under those of Python's packages.
fn packages(roots: &[PathBuf]) -> Vec<PathBuf> {
    let inside =
        |root: &PathBuf| ["nvidia/cu13/lib", "nvidia/cublas/lib"].map(|end| root.join(end));
    roots.iter().flat_map(inside).filter(|folder| folder.is_dir()).collect()
}

/// Where the python3 at hand looks for packages; none where there is no python3.
fn python_folders() -> Vec<PathBuf> {
    let mut python = Command::new("python3");
    python.args(["-c", "import sys; print('\\n'.join(sys.path))"]).stdin(Stdio::null());
    let Ok(said) = python.stderr(Stdio::null()).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&said.stdout).into_owned();
    text.lines().filter(|line| !line.is_empty()).map(PathBuf::from).collect()
}

fn open(library: &Path, helper: &Path) -> Result<&'static Library, String> {
    // The library asks for its helper by the bare name: by then that must be loaded.
    for name in [helper, library] {
        // SAFETY: the libraries are NVIDIA's, found under their own names; what they run when they
        // are loaded is theirs, and they stay loaded.
        match unsafe { Library::new(name) } {
            Ok(loaded) if name == library => return Ok(Box::leak(Box::new(loaded))),
            Ok(loaded) => drop(Box::leak(Box::new(loaded))),
            Err(error) => {
                return Err(format!("{}: {}", name.display(), one_line(&error)));
            }
        }
    }
    Err(format!("{}: not loaded", library.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder of this test's own, gone with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path =
                std::env::temp_dir().join(format!("lightering-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn a_wheels_folder_is_found_beside_pythons_packages() {
        let root = Folder::new("wheels");
        let lib = root.0.join("nvidia/cu13/lib");
        std::fs::create_dir_all(&lib).unwrap();
        let folders = [PathBuf::from("/nonexistent"), root.0.clone()];
        assert_eq!(packages(&folders), std::slice::from_ref(&lib));
        assert_eq!(pairs(&lib), [], "an empty folder holds none");
        std::fs::write(lib.join("libcublas.so.13"), "").unwrap();
        let found = (lib.join("libcublas.so.13"), lib.join("libcublasLt.so.13"));
        assert_eq!(pairs(&lib), std::slice::from_ref(&found));
        assert_eq!(pairs(&found.0), [found], "the file itself may be named");
        let error = open(&lib.join("libcublas.so.13"), &lib.join("libcublasLt.so.13")).unwrap_err();
        assert!(error.contains("libcublasLt.so.13") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn a_toolkit_is_looked_for_where_its_variables_say() {
        let home = |name: &str| (name == "CUDA_HOME").then(|| PathBuf::from("/opt/cuda"));
        let wanted = ["/opt/cuda/lib64", "/usr/local/cuda/lib64"].map(PathBuf::from);
        assert_eq!(toolkits(home), wanted);
    }

    #[test]
    fn the_loaders_own_search_is_by_bare_name_newest_first() {
        let names: Vec<PathBuf> = pairs(Path::new("")).into_iter().map(|pair| pair.0).collect();
        assert_eq!(names, ["libcublas.so.13", "libcublas.so.12"].map(PathBuf::from));
    }
}
