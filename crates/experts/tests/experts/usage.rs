use std::fs;
use std::path::{Path, PathBuf};

use experts::usage::{Origin, USAGE_BYTES_MAX, history_path, merge, model_id};
use experts::{Usage, UsageError, UsageShape};

const SHAPE: UsageShape = UsageShape { layers: 2, experts: 4, family: "olmoe" };

fn counted(layer: usize, expert: usize, selections: u64) -> Usage {
    let mut usage = Usage::empty(SHAPE);
    usage.add(layer, expert, selections);
    usage
}

fn load(path: &Path) -> Result<Usage, UsageError> {
    Usage::load(path, SHAPE, Origin::Found).map(|(usage, _)| usage)
}

/// Names in a directory, sorted.
fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A directory with a history of some text.
fn with(text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(".coli_usage");
    fs::write(&path, text).unwrap();
    (dir, path)
}

#[test]
fn what_is_merged_is_added_to_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(".coli_usage");
    assert!(load(&path).unwrap().is_empty());
    merge(&path, &counted(0, 1, 5)).unwrap();
    merge(&path, &counted(2, 3, 7)).unwrap();
    let (merged, problems) = merge(&path, &counted(0, 1, 2)).unwrap();
    assert_eq!(problems.total, 0);
    assert_eq!((merged.layer(0), merged.layer(2)), (&[0, 7, 0, 0][..], &[0, 0, 0, 7][..]));
    assert_eq!(load(&path).unwrap(), merged);
    assert_eq!(fs::read_to_string(&path).unwrap(), merged.to_text());
    assert_eq!(names(dir.path()), [".coli_usage", ".coli_usage.lock"]);
}

#[test]
fn nothing_counted_touches_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("missing/.coli_usage");
    merge(&path, &Usage::empty(SHAPE)).unwrap();
    assert!(names(dir.path()).is_empty());
    let (dir, path) = with("0 1 5\nnonsense\n");
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    let (usage, problems) = merge(&path, &Usage::empty(SHAPE)).unwrap();
    assert_eq!((usage.layer(0)[1], problems.total), (5, 1));
    assert_eq!(fs::read_to_string(&path).unwrap(), "0 1 5\nnonsense\n");
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
    assert_eq!(names(dir.path()), [".coli_usage"]);
}

#[test]
fn a_damaged_record_costs_itself_and_nothing_else() {
    let (_dir, path) = with("0 1 5\nnonsense\n9 9 9\n2 3 7\n");
    let (merged, problems) = merge(&path, &counted(0, 0, 1)).unwrap();
    assert_eq!((merged.layer(0), merged.layer(2)), (&[1, 5, 0, 0][..], &[0, 0, 0, 7][..]));
    assert_eq!(problems.total, 2);
    let (again, problems) = Usage::load(&path, SHAPE, Origin::Found).unwrap();
    assert_eq!((again, problems.total), (merged, 0));
}

#[test]
fn what_is_not_understood_is_never_overwritten() {
    let foreign = [
        "-1 2 4\n-2 1 3815245270\n0 1 5\n",
        "-2 2 3841822045\n0 1 5\n",
        "-1 3 4\n-2 1 3841822045\n0 1 5\n",
        "-1 2 5\n0 1 5\n",
        "dear diary\n",
        "\0\0\0\0",
    ];
    for text in foreign {
        let (_dir, path) = with(text);
        let error = merge(&path, &counted(0, 1, 1)).unwrap_err();
        assert!(error.to_string().contains("remove"), "{text:?}: {error}");
        assert!(error.to_string().contains(path.to_str().unwrap()), "{text:?}: {error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), text);
    }
    // Neither an empty file nor one with headers alone has anything to lose.
    for text in ["", "\n", "-1 2 4\n-2 1 3841822045\nnonsense\n"] {
        let (_dir, path) = with(text);
        let (merged, _) = merge(&path, &counted(0, 1, 1)).unwrap();
        assert_eq!(merged.layer(0)[1], 1, "{text:?}");
    }
}

#[test]
fn writers_that_share_a_history_lose_nothing() {
    const WRITERS: usize = 4;
    const TURNS: usize = 25;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep/er/.coli_usage");
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let path = &path;
            scope.spawn(move || {
                for _ in 0..TURNS {
                    merge(path, &counted(1, writer, 3)).unwrap();
                }
            });
        }
    });
    assert_eq!(load(&path).unwrap().layer(1), [3 * TURNS as u64; WRITERS]);
}

#[test]
fn only_regular_files_of_a_sane_size_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(".coli_usage");
    fs::create_dir(&path).unwrap();
    assert!(matches!(load(&path), Err(UsageError::NotAFile { .. })));
    fs::remove_dir(&path).unwrap();
    fs::File::create(&path).unwrap().set_len(USAGE_BYTES_MAX + 1).unwrap();
    assert!(matches!(load(&path), Err(UsageError::TooLarge { .. })));
    assert!(merge(&path, &counted(0, 0, 1)).is_err());
    fs::remove_file(&path).unwrap();
    let lock = dir.path().join(".coli_usage.lock");
    fs::remove_file(&lock).unwrap();
    fs::create_dir(&lock).unwrap();
    let error = merge(&path, &counted(0, 0, 1)).unwrap_err().to_string();
    assert!(error.contains(".coli_usage.lock"), "{error}");
}

#[cfg(unix)]
#[test]
fn links_are_replaced_and_not_followed() {
    use std::os::unix::fs::symlink;
    let (dir, precious) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let target = precious.path().join("file");
    fs::write(&target, "0 1 5\n").unwrap();
    let path = dir.path().join(".coli_usage");
    symlink(&target, &path).unwrap();
    symlink(&target, dir.path().join(".coli_usage.tmp")).unwrap();
    let (merged, _) = merge(&path, &counted(0, 1, 1)).unwrap();
    assert_eq!(merged.layer(0)[1], 6);
    assert_eq!(fs::read_to_string(&target).unwrap(), "0 1 5\n");
    assert!(fs::symlink_metadata(&path).unwrap().is_file());
    fs::remove_file(dir.path().join(".coli_usage.lock")).unwrap();
    symlink(precious.path().join("new"), dir.path().join(".coli_usage.lock")).unwrap();
    merge(&path, &counted(0, 1, 1)).unwrap_err();
    assert_eq!(names(precious.path()), ["file"]);
}

#[test]
fn a_history_away_from_its_model_is_made_with_its_directories() {
    let (model, state) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let id = model_id(&[7; 32]);
    let path = history_path(model.path(), false, false, Some(state.path()), &id).unwrap();
    merge(&path, &counted(0, 1, 5)).unwrap();
    assert_eq!(load(&path).unwrap().layer(0)[1], 5);
    assert!(names(model.path()).is_empty());
    let usage = state.path().join("colibri/usage");
    let name = format!("{id}.coli_usage");
    assert_eq!(names(&usage), [name.clone(), format!("{name}.lock")]);
}
