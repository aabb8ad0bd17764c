"""Stable-Baselines3's policies in workers: PPO trains, worker processes play with the newest policy all the time.

Run me: python sb3_workers.py             (pip install stable-baselines3)

The trainer is Stable-Baselines3's own PPO. Before each of its rollouts, a callback publishes two models as one update:
the policy, which is a module, and the statistics by which VecNormalize normalises observations, an object whose
attributes are NumPy arrays. Each worker has a policy and a VecNormalize of its own, and plays whole episodes by
Stable-Baselines3's evaluate_policy. In a hold, no update comes before the episode has ended. (Where nothing but the
policy is synchronised, init_on_receiver(…, gated=("predict",)) has each call of policy.predict see one version.)
"""

import importlib.util
import multiprocessing
import sys

import torch

from asyncsync.sync import Bus, SharedMemWeightSyncScheme

WORKERS, TIMESTEPS, ROLLOUT = 2, 4096, 512
ENVIRONMENT = "CartPole-v1"


def environment(*, training):
    """CartPole, with observations that are normalised; a worker's statistics come from the trainer."""
    import gymnasium
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    return VecNormalize(DummyVecEnv([lambda: gymnasium.make(ENVIRONMENT)]), training=training, norm_reward=False)


def algorithm(env):
    from stable_baselines3 import PPO

    return PPO("MlpPolicy", env, n_steps=ROLLOUT, batch_size=64, learning_rate=1e-3, seed=0, device="cpu")


def work(schemes, index):
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    env = environment(training=False)
    policy = algorithm(env).policy
    schemes["policy"].init_on_receiver("policy", model=policy, worker_idx=index)
    schemes["observations"].init_on_receiver("observations", model=env.obs_rms, worker_idx=index)
    bus = schemes["policy"].bus
    bus.connect()  # policy and statistics are the trainer's
    while not bus.closed:
        with bus.hold() as held:
            [reward], _ = evaluate_policy(policy, env, n_eval_episodes=1, return_episode_rewards=True, warn=False)
        steps = held.metadata.get("timesteps", 0)
        print(f"worker {index}: version {held.version}, of {steps} timesteps: return {reward:.0f}", flush=True)
    print(f"worker {index}: the last version is {bus.version}", flush=True)
    bus.shutdown()


def train(bus, model, env):
    from stable_baselines3.common.callbacks import BaseCallback

    class Publish(BaseCallback):
        """Called by PPO before each rollout: its policy has just been trained."""

        def _on_step(self):
            return True

        def _on_rollout_start(self):
            weights = {"policy": self.model.policy, "observations": env.obs_rms}
            version = bus.publish(weights, metadata={"timesteps": self.num_timesteps})  # waits for no worker
            print(f"trainer: {self.num_timesteps} timesteps, version {version}", flush=True)

    model.learn(TIMESTEPS, callback=Publish())
    bus.send({"policy": model.policy, "observations": env.obs_rms}, metadata={"timesteps": model.num_timesteps})


def main():
    if importlib.util.find_spec("stable_baselines3") is None:
        sys.exit("this example needs Stable-Baselines3: pip install stable-baselines3")
    torch.set_num_threads(1)
    env = environment(training=True)
    model = algorithm(env)
    bus = Bus(num_workers=WORKERS)
    schemes = {"policy": SharedMemWeightSyncScheme(bus=bus), "observations": SharedMemWeightSyncScheme(bus=bus)}
    schemes["policy"].init_on_sender(model_id="policy", model=model.policy)
    schemes["observations"].init_on_sender(model_id="observations", model=env.obs_rms)
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=work, args=(schemes, index), daemon=True) for index in range(WORKERS)]
    for process in workers:
        process.start()
    with bus:  # says goodbye to the workers in the end
        bus.connect(processes=workers)
        train(bus, model, env)
    for process in workers:
        process.join(timeout=30)


if __name__ == "__main__":
    main()
