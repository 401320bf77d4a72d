//! What the machine gives this process: memory within its control group, cores within its
//! affinity and quota, and what it has used. Unknown is unknown, never zero.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Part of the available memory that is left to others when no ceiling is given.
const RESERVE_SHARE: u64 = 10;
/// Least of it, in bytes.
const RESERVE_BYTES_MIN: u64 = 256_000_000;
/// Control groups report "no limit" as a number of this size or more.
const UNLIMITED: u64 = 1 << 60;

/// Memory that may be used, and which bound was the smallest.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MemoryBound {
    /// Bytes free for this process.
    pub bytes: u64,
    /// `host` or the control group's file.
    pub bound_by: String,
}

/// Root of the file system to look in; tests give another.
#[derive(Clone, Debug)]
pub struct Machine {
    root: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Machine { root: PathBuf::from("/") }
    }
}

impl Machine {
    /// A machine whose `/proc` and `/sys` lie under `root`.
    pub fn at(root: &Path) -> Machine {
        Machine { root: root.to_owned() }
    }

    fn read(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path.trim_start_matches('/'))).ok()
    }

    fn read_number(&self, path: &str) -> Option<u64> {
        self.read(path)?.trim().parse().ok()
    }

    /// Memory available now: the smaller of the host's and each control group's limit minus its
    /// use. `None` where the system says nothing.
    pub fn memory_available(&self) -> Option<MemoryBound> {
        let host = self.read("/proc/meminfo").and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemAvailable:"))?;
            let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
            Some(MemoryBound { bytes: kib * 1024, bound_by: "host".to_owned() })
        });
        let groups = self.control_groups();
        host.into_iter().chain(groups).min_by_key(|bound| bound.bytes)
    }

    /// Free bytes of every control group this process is in, version 2 and 1.
    fn control_groups(&self) -> Vec<MemoryBound> {
        let mut bounds = Vec::new();
        let membership = self.read("/proc/self/cgroup").unwrap_or_default();
        for line in membership.lines() {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next(), fields.next(), fields.next());
            let (Some(controllers), Some(path)) = (controllers, path) else { continue };
            let (mount, limit, usage) = if controllers.is_empty() {
                ("/sys/fs/cgroup", "memory.max", "memory.current")
            } else if controllers.split(',').any(|name| name == "memory") {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
            } else {
                continue;
            };
            // Limits of every ancestor hold; inside a container the path may not exist, and the
            // mount itself is the group.
            let mut at = path.trim_end_matches('/').to_owned();
            loop {
                let limit_file = format!("{mount}{at}/{limit}");
                if let Some(max) = self.read_number(&limit_file).filter(|max| *max < UNLIMITED) {
                    let used = self.read_number(&format!("{mount}{at}/{usage}")).unwrap_or(0);
                    let bytes = max.saturating_sub(used);
                    bounds.push(MemoryBound { bytes, bound_by: limit_file });
                }
                match at.rfind('/') {
                    Some(cut) => at.truncate(cut),
                    None => break,
                }
            }
        }
        bounds
    }

    /// Ceiling to use when the user gives none: what is available plus what this process already
    /// holds, less a reserve for everyone else.
    pub fn default_ceiling(&self) -> Option<MemoryBound> {
        let mut bound = self.memory_available()?;
        let reserve = (bound.bytes / RESERVE_SHARE).max(RESERVE_BYTES_MIN);
        bound.bytes = bound.bytes.saturating_sub(reserve) + self.rss_bytes().unwrap_or(0);
        Some(bound)
    }

    /// What kind of machine this is: processor, cores, and memory in whole GB.
    pub fn description(&self) -> String {
        let processor = self.read("/proc/cpuinfo").and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        });
        let memory = self.read("/proc/meminfo").and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("MemTotal:"))?;
            let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
            Some(format!(", {} GB", (kib * 1024 + 500_000_000) / 1_000_000_000))
        });
        format!(
            "{}, {} cores{}",
            processor.as_deref().unwrap_or(std::env::consts::ARCH),
            self.compute_threads(),
            memory.unwrap_or_default()
        )
    }

    fn status_kib(&self, field: &str) -> Option<u64> {
        let status = self.read("/proc/self/status")?;
        let line = status.lines().find(|line| line.starts_with(field))?;
        line.split_whitespace().nth(1)?.parse().ok()
    }

    /// Bytes of memory this process holds that count against it: anonymous and shared pages.
    pub fn rss_bytes(&self) -> Option<u64> {
        self.status_kib("VmRSS:").map(|kib| kib * 1024)
    }

    /// Most memory this process has held, in bytes.
    pub fn peak_rss_bytes(&self) -> Option<u64> {
        self.status_kib("VmHWM:").map(|kib| kib * 1024)
    }

    /// Threads to compute with: physical cores among the CPUs this process may run on, within the
    /// control group's quota.
    pub fn compute_threads(&self) -> usize {
        let allowed = std::thread::available_parallelism().map_or(1, usize::from);
        let cores: BTreeSet<(u64, u64)> = allowed_cpus()
            .into_iter()
            .filter_map(|cpu| {
                let topology = format!("/sys/devices/system/cpu/cpu{cpu}/topology");
                let package = self.read_number(&format!("{topology}/physical_package_id"))?;
                Some((package, self.read_number(&format!("{topology}/core_id"))?))
            })
            .collect();
        if cores.is_empty() { allowed } else { cores.len().min(allowed) }
    }
}

#[cfg(target_os = "linux")]
fn allowed_cpus() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return Vec::new() };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

#[cfg(not(target_os = "linux"))]
fn allowed_cpus() -> Vec<usize> {
    Vec::new()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let machine = Machine::at(dir.path());
        (dir, machine)
    }

    const MEMINFO: (&str, &str) = ("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 8000 kB\n");

    #[test]
    fn without_control_groups_the_host_bounds() {
        let (_dir, machine) = machine(&[MEMINFO]);
        let want = MemoryBound { bytes: 8_192_000, bound_by: "host".to_owned() };
        assert_eq!(machine.memory_available(), Some(want));
    }

    #[test]
    fn a_version_2_group_and_its_ancestors_bound() {
        let (_dir, machine) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "0::/a/b\n"),
            ("sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("sys/fs/cgroup/a/memory.max", "5000000\n"),
            ("sys/fs/cgroup/a/memory.current", "1000000\n"),
        ]);
        let bound = machine.memory_available().unwrap();
        assert_eq!(bound.bytes, 4_000_000);
        assert!(bound.bound_by.ends_with("/a/memory.max"));
    }

    #[test]
    fn a_version_1_group_bounds_also_when_only_the_mount_is_visible() {
        let (_dir, machine) = machine(&[
            MEMINFO,
            ("proc/self/cgroup", "5:cpu:/x\n9:memory:/docker/abc\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "3000000\n"),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "500000\n"),
        ]);
        assert_eq!(machine.memory_available().unwrap().bytes, 2_500_000);
    }

    #[test]
    fn an_unknown_system_is_unknown_not_zero() {
        let (_dir, machine) = machine(&[]);
        assert_eq!(machine.memory_available(), None);
        assert_eq!(machine.rss_bytes(), None);
        assert!(machine.compute_threads() >= 1);
    }
}
