#include "penstock/language_model.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <memory>

#include "penstock/base/describe.h"
#include "penstock/dtensor.h"
#include "penstock/errors.h"

namespace penstock::models {
namespace {

constexpr std::int64_t kSampling = purpose::kFirstOfUser + 1;

// Restores the mode, also after an exception of the callback.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& module) : module_(module), before_(module.is_training()) {
    module_.eval();
  }
  ~EvaluationMode() { module_.train(before_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& module_;
  bool before_;
};

void check(const ModelStage& model, const at::Tensor& prompt, const GenerateOptions& how) {
  if (!model.is_whole())
    throw StateError(describe("generate",
                              fmt::format("stage {} of {}", model.part().index, model.part().count),
                              "a whole model", "load the checkpoint into a stage made with whole_model()"));
  if (prompt.dim() != 2 || prompt.size(1) < 1 || prompt.scalar_type() != at::kLong)
    throw ValueError(describe("generate: prompt",
                              fmt::format("{} of {} dims", c10::toString(prompt.scalar_type()), prompt.dim()),
                              "Long [batch, length] with at least one token"));
  if (how.max_tokens < 0)
    throw ValueError(describe("generate: max_tokens", fmt::format("{}", how.max_tokens), "at least 0"));
  // The last token is not fed back, so one more fits.
  if (!how.slide && prompt.size(1) + how.max_tokens > model.context() + 1)
    throw ValueError(
        describe("generate", fmt::format("a prompt of {} and {} new tokens", prompt.size(1), how.max_tokens),
                 fmt::format("at most {} in all, one more than model.context", model.context() + 1),
                 "shorten the prompt, lower max_tokens, or set slide"));
}

}  // namespace

at::Tensor sample(const at::Tensor& logits, const SampleOptions& how, const RandomKey& key) {
  if (!(how.temperature >= 0) || how.top_k < 0)
    throw ValueError(describe("sample: temperature and top_k",
                              fmt::format("{} and {}", how.temperature, how.top_k),
                              "numbers not less than 0"));
  const at::Tensor whole = (is_dtensor(logits) ? full_tensor(logits) : logits).detach();
  if (how.temperature == 0) return whole.argmax(-1);
  at::Tensor scores = whole.to(at::kFloat).div(how.temperature);
  if (how.top_k > 0 && how.top_k < scores.size(-1)) {
    const at::Tensor least = std::get<0>(scores.topk(how.top_k, -1)).select(-1, how.top_k - 1).unsqueeze(-1);
    scores = scores.masked_fill(scores.lt(least), -std::numeric_limits<double>::infinity());
  }
  const at::Tensor noise = at::empty_like(scores, at::MemoryFormat::Contiguous);
  keyed_uniform_(noise, key, 0, 1);
  return scores.sub(noise.log().neg().log()).argmax(-1);
}

at::Tensor generate(ModelStage& model, const at::Tensor& prompt, const GenerateOptions& how,
                    const TokenCallback& callback) {
  check(model, prompt, how);
  if (how.max_tokens == 0) return prompt.clone();
  const c10::AutoGradMode no_grad(false);
  const EvaluationMode evaluation(model);
  const std::int64_t begin = prompt.size(1), end = begin + how.max_tokens;
  at::Tensor tokens = at::empty({prompt.size(0), end}, prompt.options());
  tokens.narrow(1, 0, begin).copy_(prompt);
  std::unique_ptr<StageCache> cache;
  const std::int64_t context = model.context();
  if (how.use_cache && begin <= context) cache = model.make_cache(std::min(end - 1, context));
  at::Tensor ended = prompt.new_zeros({prompt.size(0)}, prompt.options().dtype(at::kBool));
  for (std::int64_t position = begin; position < end; ++position) {
    if (position > context) cache.reset();
    const std::int64_t known = cache ? cache->length() : std::max<std::int64_t>(position - context, 0);
    const at::Tensor fresh = tokens.narrow(1, known, position - known);
    const Tree keywords = how.metadata ? how.metadata(tokens.narrow(1, 0, position), known) : Tree();
    const at::Tensor logits =
        cache ? model.forward_cached_with(fresh, *cache, keywords) : model.forward_with(fresh, keywords);
    at::Tensor next = sample(logits.select(1, logits.size(1) - 1), {how.temperature, how.top_k},
                             {.seed = how.seed, .step = position, .purpose = kSampling});
    if (how.stop_token) {
      next = next.masked_fill(ended, *how.stop_token);
      ended = ended.logical_or(next.eq(*how.stop_token));
    }
    tokens.select(1, position).copy_(next);
    bool more = true;
    if (callback) {
      const at::Tensor host = next.to(at::kCPU).contiguous();
      more = callback(std::vector<std::int64_t>(host.data_ptr<std::int64_t>(),
                                                host.data_ptr<std::int64_t>() + host.numel()),
                      position);
    }
    if (how.stop_token && more) more = !ended.all().item<bool>();
    if (!more) return tokens.narrow(1, 0, position + 1).clone();
  }
  return tokens;
}

}  // namespace penstock::models
