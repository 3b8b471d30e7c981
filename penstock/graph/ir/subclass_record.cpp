#include "penstock/graph/ir/subclass_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "penstock/base/describe.h"
#include "penstock/errors.h"
#include "penstock/fake.h"
#include "penstock/torch/fake/fake_parts.h"

namespace penstock::graph {
namespace {

std::string kind_and_context(const Payload& payload) {
  const c10::IValue context = payload.context();
  if (context.isNone()) return std::string(payload.kind());
  std::ostringstream text;
  if (context.isString())
    text << context.toStringRef();
  else
    text << context;
  return fmt::format("{} {}", payload.kind(), text.str());
}

void collect(const at::Tensor& tensor, std::vector<at::Tensor>& parts) {
  if (!is_subclass(tensor)) {
    parts.push_back(tensor);
    return;
  }
  for (const auto& [name, inner] : payload_of(tensor)->inner_tensors()) collect(inner, parts);
}

void collect_names(const FlattenRecord& record, const std::string& prefix, std::vector<std::string>& names) {
  if (!record.is_subclass()) {
    names.push_back(prefix);
    return;
  }
  for (const auto& [name, attribute] : record.subclass().attributes)
    collect_names(attribute, prefix + "." + name, names);
}

}  // namespace

bool is_subclass(const at::Tensor& tensor) { return is_wrapper(tensor) && !is_fake(tensor); }

std::vector<at::Tensor> plain_parts(const at::Tensor& tensor) {
  std::vector<at::Tensor> parts;
  collect(tensor, parts);
  return parts;
}

at::Tensor to_fake_parts(const at::Tensor& tensor) { return penstock::to_fake_parts(tensor); }

at::Tensor SubclassMeta::sample() const {
  std::vector<at::Tensor> inner;
  for (const auto& [name, tensor] : like->inner_tensors()) inner.push_back(tensor);
  return like->rebuild(inner, outer);
}

std::string SubclassMeta::to_text() const { return kind_and_context(*like); }

bool SubclassMeta::operator==(const SubclassMeta& other) const {
  return first_flat == other.first_flat && count == other.count && outer == other.outer &&
         like->same_context(*other.like) && attributes == other.attributes;
}

FlattenRecord FlattenRecord::of(const at::Tensor& tensor, std::size_t first_flat) {
  if (!graph::is_subclass(tensor)) return PlainTensorMeta{first_flat, geometry_of(tensor)};
  SubclassMeta meta;
  meta.first_flat = first_flat;
  meta.outer = penstock::geometry_of(tensor);
  for (const auto& [name, inner] : payload_of(tensor)->inner_tensors()) {
    meta.attributes.emplace_back(name, of(inner, first_flat + meta.count));
    meta.count += meta.attributes.back().second.count();
  }
  // A separate payload: the tensor's own may hold real memory, and in-place operators on the tensor modify
  // it.
  const at::Tensor sample = to_fake_parts(tensor);
  PENSTOCK_INVARIANT(graph::is_subclass(sample) && payload_of(sample)->kind() == payload_of(tensor)->kind(),
                     "a rebuilt subclass has a different kind");
  meta.like = PayloadPtr::reclaim_copy(payload_of(sample));
  return meta;
}

bool FlattenRecord::matches(const at::Tensor& tensor) const {
  if (!is_subclass())
    return !graph::is_subclass(tensor) && plain().geometry && has_geometry(tensor, *plain().geometry);
  const Payload* payload = graph::is_subclass(tensor) ? payload_of(tensor) : nullptr;
  const SubclassMeta& meta = subclass();
  if (!payload || !meta.like->same_context(*payload) || !(penstock::geometry_of(tensor) == meta.outer))
    return false;
  const auto inner = payload->inner_tensors();
  if (inner.size() != meta.attributes.size()) return false;
  for (std::size_t i = 0; i < inner.size(); ++i)
    if (!meta.attributes[i].second.matches(inner[i].second)) return false;
  return true;
}

std::string FlattenRecord::difference(const at::Tensor& tensor) const {
  if (matches(tensor)) return {};
  const std::string now = type_text(tensor),
                    expected = is_subclass() ? subclass().to_text() : "a plain tensor";
  if (now != expected) return fmt::format("{}, in the capture {}", now, expected);
  if (!is_subclass())
    return fmt::format("{}, in the capture {}", to_text(geometry_of(tensor)),
                       plain().geometry ? to_text(*plain().geometry) : "nothing");
  const auto inner = payload_of(tensor)->inner_tensors();
  for (std::size_t i = 0; i < std::min(inner.size(), subclass().attributes.size()); ++i)
    if (const std::string inside = subclass().attributes[i].second.difference(inner[i].second);
        !inside.empty())
      return fmt::format("{} with {} {}", now, inner[i].first, inside);
  return fmt::format("{} with a different mesh, geometry or context than in the capture", now);
}

void FlattenRecord::flatten(const at::Tensor& tensor, std::vector<at::Tensor>& flat) const {
  const std::size_t before = flat.size();
  if (is_subclass())
    collect(tensor, flat);
  else
    flat.push_back(tensor);
  PENSTOCK_INVARIANT(flat.size() - before == count(),
                     "a subclass contains a different number of tensors than its record");
}

at::Tensor FlattenRecord::rebuild(const std::vector<at::Tensor>& flat) const {
  if (first_flat() + count() > flat.size())
    throw ValueError(describe("graph: number of tensors to rebuild a tensor from",
                              std::to_string(flat.size()),
                              fmt::format("at least {}, of which it uses indices {} to {}",
                                          first_flat() + count(), first_flat(), first_flat() + count() - 1)));
  if (!is_subclass()) return flat[plain().flat_index];
  std::vector<at::Tensor> inner;
  for (const auto& [name, attribute] : subclass().attributes) {
    inner.push_back(attribute.rebuild(flat));
    if (!inner.back().defined())
      throw ValueError(fmt::format("graph: tensor {} of a {} is undefined; pass all of them or none", name,
                                   subclass().kind()));
  }
  return subclass().like->rebuild(inner, subclass().outer);
}

std::vector<std::string> FlattenRecord::plain_names() const {
  std::vector<std::string> names;
  collect_names(*this, "", names);
  return names;
}

std::string type_text(const at::Tensor& tensor) {
  return is_subclass(tensor) ? kind_and_context(*payload_of(tensor)) : "a plain tensor";
}

}  // namespace penstock::graph
