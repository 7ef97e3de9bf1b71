# CPU image: docker build -t sensorium . && docker run -p 8000:8000 -v sensorium:/cache sensorium
FROM python:3.12-slim
ENV SENSORIUM_CACHE=/cache PYTHONUNBUFFERED=1
WORKDIR /app
COPY . /app
RUN pip install --no-cache-dir . && useradd --create-home sensorium && mkdir /cache && chown sensorium /cache
USER sensorium
VOLUME /cache
EXPOSE 8000
WORKDIR /home/sensorium
ENTRYPOINT ["sensorium"]
CMD ["serve", "--host", "0.0.0.0"]
