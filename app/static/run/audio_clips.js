// Clips that a run logged: a button, the waveform as a slider, the length.
import { number } from 'formats'
import { captionOf, isCaption, missing } from 'media_images'

const BARS = 120 // of a waveform
const HZ = 8000 // at which it is read; what it is played at stays

/** Peaks of a clip, from 0 to 1. @param {Float32Array} samples */
export const peaks = (samples) =>
  Array.from({ length: BARS }, (_, i) => {
    const part = samples.subarray(
      Math.floor((i * samples.length) / BARS),
      Math.floor(((i + 1) * samples.length) / BARS),
    )
    return part.reduce((most, value) => Math.max(most, Math.abs(value)), 0)
  })

/** @param {import('media').MediaFile} file */
const clip = (file) => {
  const row = document.createElement('li')
  if (!file.address) {
    row.append(missing())
    return row
  }
  row.innerHTML =
    '<button type="button" class="square small"></button><span class="wave"><svg preserveAspectRatio="none" aria-hidden="true"><path/></svg><input type="range" min="0" max="1000" value="0"></span><span class="quiet number"></span>'
  const [button, slider, path, length] = ['button', 'input', 'path', '.number'].map(
    (part) => /** @type {any} */ (row.querySelector(part)),
  )
  const sound = new Audio()
  sound.preload = 'none'
  sound.src = file.address
  slider.setAttribute('aria-label', `Position in ${file.name}`)
  const label = () => {
    button.textContent = sound.paused ? '▶' : '❚❚'
    button.setAttribute('aria-label', `${sound.paused ? 'Play' : 'Pause'} ${file.name}`)
  }
  label()
  button.addEventListener('click', () => (sound.paused ? sound.play() : sound.pause()))
  for (const name of ['play', 'pause', 'ended']) sound.addEventListener(name, () => label())
  sound.addEventListener('timeupdate', () => {
    slider.value = String((1000 * sound.currentTime) / sound.duration)
  })
  slider.addEventListener('input', () => {
    if (Number.isFinite(sound.duration)) sound.currentTime = (sound.duration * Number(slider.value)) / 1000
    else sound.load()
  })
  const draw = async () => {
    const bytes = await (await fetch(file.address)).arrayBuffer()
    const decoded = await new OfflineAudioContext(1, 1, HZ).decodeAudioData(bytes)
    length.textContent = `${number(decoded.duration, 3)} s`
    path.parentNode.setAttribute('viewBox', `0 -1 ${BARS} 2`)
    path.setAttribute(
      'd',
      peaks(decoded.getChannelData(0))
        .map((peak, i) => `M${i + 0.5} ${-Math.max(peak, 0.02)}V${Math.max(peak, 0.02)}`)
        .join(''),
    )
  }
  draw().catch(() => {
    length.textContent = 'no waveform'
  })
  return row
}

/** @param {import('media').MediaCard} card @returns {import('media').ShowMedia} */
export const createAudio = ({ body, say }) => {
  const list = Object.assign(document.createElement('ul'), { className: 'clips' })
  return (files) => {
    for (const button of list.querySelectorAll('button[aria-label^=Pause]')) /** @type {any} */ (button).click()
    const sounds = files.filter((file) => !isCaption(file))
    list.replaceChildren(
      ...sounds.map((file) => {
        const row = clip(file)
        row.append(captionOf(file, files))
        return row
      }),
    )
    body.replaceChildren(list)
    say(sounds.length > 1 ? `${sounds.length} clips` : '')
  }
}
