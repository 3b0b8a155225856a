//! Copies the journal's file while a worker writes to it. The copy is a plain SQLite file.
//!
//! The worker holds an exclusive lock for as long as it runs, so a second SQLite connection cannot read the file. This
//! module reads the database and its write-ahead log as bytes; it changes nothing, does not block, and takes no space
//! on the volume.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, SystemTime};

use super::FILE;

/// Length of the log's header, and of the header of each frame. See
/// <https://www.sqlite.org/fileformat2.html#walformat>.
const LOG_HEADER: usize = 32;
const FRAME_HEADER: usize = 24;
/// Magic number of a log; its lowest bit selects the byte order of the checksums.
const LOG_MAGIC: u32 = 0x377f_0682;
/// Upper bound of the granularity of a file system's timestamps.
const TICK: Duration = Duration::from_millis(20);

#[cfg_attr(test, derive(strum::EnumCount))]
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// A file could not be read, or the copy could not be written.
    #[error("cannot copy the journal: {0}")]
    Io(#[from] io::Error),
    /// The file is not a SQLite database.
    #[error("no journal in this directory: the file is not a SQLite database")]
    NoJournal,
    /// The worker checkpointed its log during the copy.
    #[error("the worker cleaned up the journal during the copy, so the copy is not valid: run the command again")]
    Changed,
}

/// Writes a copy of the journal in `dir`, as of its last commit. After an error, the output is not a valid copy.
///
/// A commit only appends to the log, so reading beside it is safe. Only a checkpoint overwrites pages: it changes the
/// modification time of the database or the header of the log, and the copy is then discarded with
/// [`CopyError::Changed`].
pub fn copy(dir: &Path, to: &mut impl Write) -> Result<(), CopyError> {
    let path = dir.join(FILE);
    let mut database = File::open(&path)?;
    let before = settled(&path)?;
    let mut log = match File::open(dir.join(format!("{FILE}-wal"))) {
        Ok(file) => Some(WriteAheadLog::read(file)?),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error.into()),
    };
    let log_pages = log.as_ref().and_then(|log| log.committed);
    let (page_size, pages) = match log_pages {
        Some(size) => size,
        None => size_of(&mut database)?,
    };
    let mut page = vec![0; page_size];
    for number in 1..=pages {
        let in_log = log
            .as_mut()
            .and_then(|log| Some((log.places.get(&number).copied()?, log)));
        match in_log {
            Some((place, log)) => read_at(&mut log.file, place, &mut page)?,
            None => read_at(&mut database, u64::from(number - 1) * page_size as u64, &mut page)?,
        }
        if number == 1 {
            // Header bytes 18 and 19: switch the copy from WAL to the rollback journal, because it has no log.
            page[18..20].fill(1);
        }
        to.write_all(&page)?;
    }
    to.flush()?;
    // Only a checkpoint writes pages to the database: without one, all pages that were read belong to one commit.
    let same_log = log.is_none_or(|mut log| log.is_still_the_same());
    if same_log && path.metadata()?.modified()? == before {
        Ok(())
    } else {
        Err(CopyError::Changed)
    }
}

/// Returns the file's modification time, once it is old enough for any later write to get a different one.
fn settled(path: &Path) -> io::Result<SystemTime> {
    loop {
        let written = path.metadata()?.modified()?;
        match written.elapsed() {
            Ok(age) if age < TICK => sleep(TICK),
            // A time in the future, after the clock was set back, cannot be waited for.
            Ok(_) | Err(_) => return Ok(written),
        }
    }
}

/// Returns the size of a page in bytes, and the number of pages.
fn size_of(database: &mut File) -> Result<(usize, u32), CopyError> {
    let mut header = [0; 100];
    read_at(database, 0, &mut header).map_err(|_| CopyError::NoJournal)?;
    if !header.starts_with(b"SQLite format 3\0") {
        return Err(CopyError::NoJournal);
    }
    let size = match usize::from(u16::from_be_bytes([header[16], header[17]])) {
        1 => 65_536,
        size => size,
    };
    Ok((size, word(&header[28..])))
}

/// The write-ahead log: the pages that it holds.
struct WriteAheadLog {
    file: File,
    header: [u8; LOG_HEADER],
    /// Size of a page and number of pages as of the log's last commit; `None` if it holds no commit.
    committed: Option<(usize, u32)>,
    /// Offset of the newest content of each page, as of that commit.
    places: HashMap<u32, u64>,
}

impl WriteAheadLog {
    fn read(mut file: File) -> io::Result<Self> {
        let mut log = Self {
            header: [0; LOG_HEADER],
            committed: None,
            places: HashMap::new(),
            file: file.try_clone()?,
        };
        if read_at(&mut file, 0, &mut log.header).is_err() || word(&log.header) & !1 != LOG_MAGIC {
            return Ok(log);
        }
        let big_endian = log.header[3] & 1 == 1;
        let page_size = word(&log.header[8..]) as usize;
        let mut sum = WalChecksum::default();
        sum.add(&log.header[..24], big_endian);
        if !(512..=65_536).contains(&page_size) || !sum.is(&log.header[24..]) {
            return Ok(log);
        }
        let mut frame = vec![0; FRAME_HEADER + page_size];
        let mut pending = Vec::new();
        let mut reader = io::BufReader::with_capacity(1 << 18, file);
        let mut place = LOG_HEADER as u64;
        while reader.read_exact(&mut frame).is_ok() {
            sum.add(&frame[..8], big_endian);
            sum.add(&frame[FRAME_HEADER..], big_endian);
            // The rest is left over from an earlier use of the file, or was torn by a crash.
            if frame[8..16] != log.header[16..24] || !sum.is(&frame[16..24]) {
                break;
            }
            pending.push((word(&frame), place + FRAME_HEADER as u64));
            place += frame.len() as u64;
            let pages = word(&frame[4..]);
            if pages > 0 {
                log.places.extend(pending.drain(..));
                log.committed = Some((page_size, pages));
            }
        }
        Ok(log)
    }

    fn is_still_the_same(&mut self) -> bool {
        let mut header = [0; LOG_HEADER];
        let read = read_at(&mut self.file, 0, &mut header);
        read.map_or(self.committed.is_none(), |()| header == self.header)
    }
}

/// SQLite's cumulative checksum of a log.
#[derive(Default)]
struct WalChecksum(u32, u32);

impl WalChecksum {
    fn add(&mut self, bytes: &[u8], big_endian: bool) {
        let read = |bytes: &[u8]| {
            if big_endian {
                word(bytes)
            } else {
                word(bytes).swap_bytes()
            }
        };
        for pair in bytes.chunks_exact(8) {
            self.0 = self.0.wrapping_add(read(pair)).wrapping_add(self.1);
            self.1 = self.1.wrapping_add(read(&pair[4..])).wrapping_add(self.0);
        }
    }

    fn is(&self, bytes: &[u8]) -> bool {
        (word(bytes), word(&bytes[4..])) == (self.0, self.1)
    }
}

/// Reads the first four bytes as a big-endian number.
fn word(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
}

fn read_at(file: &mut File, place: u64, into: &mut [u8]) -> io::Result<()> {
    file.seek(SeekFrom::Start(place))?;
    file.read_exact(into)
}
