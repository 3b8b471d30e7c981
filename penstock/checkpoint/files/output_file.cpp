#include "penstock/checkpoint/files/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <system_error>
#include <utility>

#include "penstock/checkpoint_types.h"

namespace penstock::checkpoint {

void throw_file_error(const std::string& action, const std::filesystem::path& path, int error) {
  std::string remedy;
  if (error == ENOSPC || error == EDQUOT)
    remedy = "; free space there, keep fewer checkpoints, or choose another folder";
  if (error == EFBIG) remedy = "; raise the limit of file sizes (ulimit -f) or lower the maximum file size";
  if (error == EACCES || error == EPERM || error == EROFS)
    remedy = "; give this user write permission, or choose another folder";
  throw CheckpointError(fmt::format("cannot {} {}: {}{}", action, path.string(),
                                    std::generic_category().message(error), remedy));
}

OutputFile::OutputFile(std::filesystem::path path, Mode mode, WriteFault fault)
    : path_(std::move(path)), fault_(std::move(fault)) {
  file_ = ::open(path_.c_str(),
                 mode == Mode::Create ? O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC : O_WRONLY | O_CLOEXEC, 0666);
  if (file_ < 0) throw_file_error(mode == Mode::Create ? "create" : "open", path_, errno);
}

OutputFile::~OutputFile() {
  if (file_ >= 0) ::close(file_);  // sync() has reported all errors of a file that matters
}

void OutputFile::reserve(std::uint64_t bytes) {
  if (::ftruncate(file_, static_cast<off_t>(bytes)) != 0)
    throw_file_error(fmt::format("reserve {} bytes in", bytes), path_, errno);
  if (bytes == 0) return;
  int result = 0;
  do result = ::fallocate(file_, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  while (result == EINTR);
  // A file system that cannot reserve space reports a full disk at the write instead.
  if (result != 0 && result != EOPNOTSUPP && result != ENOSYS)
    throw_file_error(fmt::format("reserve {} bytes in", bytes), path_, result);
}

void OutputFile::write(std::uint64_t offset, std::span<const std::uint8_t> bytes) {
  while (!bytes.empty()) {
    if (const int error = fault_ ? fault_(path_, offset, bytes.size()) : 0; error != 0)
      throw_file_error(fmt::format("write bytes {}-{} of", offset, offset + bytes.size()), path_, error);
    const ssize_t written =
        ::pwrite(file_, bytes.data(), std::min<std::size_t>(bytes.size(), std::size_t{1} << 30),
                 static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0)
      throw_file_error(fmt::format("write bytes {}-{} of", offset, offset + bytes.size()), path_,
                       written < 0 ? errno : ENOSPC);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void OutputFile::sync() {
  if (::fsync(file_) != 0) throw_file_error("flush", path_, errno);
}

void write_file(const std::filesystem::path& path, const std::string& text, const WriteFault& fault) {
  OutputFile file(path, OutputFile::Mode::Create, fault);
  file.write(0, {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()});
}

void sync_file(const std::filesystem::path& path) { OutputFile(path, OutputFile::Mode::Existing).sync(); }

void sync_folder(const std::filesystem::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw_file_error("open", folder, errno);
  const int error = ::fsync(file) == 0 ? 0 : errno;
  ::close(file);
  // Some network file systems do not support the call for folders; their names are on the server already.
  if (error != 0 && error != EINVAL) throw_file_error("flush", folder, error);
}

}  // namespace penstock::checkpoint
